//! Tokens for agents without a projected token. Each is made for one pod, expires soon, and belongs to the first key that presents it. Only
//! digests are kept.
//!
//! Such a token is in the pod's environment, where every user who may read pods sees it. So it is accepted only from the pod's own
//! addresses. The same key may use it again, because a response can be lost. A second key proves a theft, whichever came first: both are
//! refused from then on.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::enrollment::{Presented, ProvenPod, TokenVerifier};
use weightsync_core::protocol::Rejection;
use weightsync_net::identity::KeyDigest;

/// Most tokens that have not expired; beyond that, the ones that expire first are dropped.
const MAX_OPEN: usize = 4096;
/// Most revoked keys; beyond that, the ones revoked first are forgotten.
const MAX_REVOKED: usize = 4096;
/// Prefix of these tokens, which distinguishes them from a cluster's.
const PREFIX: &str = "wst1-";

/// Called with the pod whose token a second key presented.
type OnTheft = Box<dyn Fn(&ProvenPod) + Send + Sync>;

/// Makes and redeems single-use tokens. Clones share them.
#[derive(Clone)]
pub struct SingleUseTokens {
    lifetime: Duration,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    open: Mutex<HashMap<blake3::Hash, Open>>,
    revoked: Mutex<HashMap<KeyDigest, Instant>>,
    on_theft: OnceLock<OnTheft>,
}

struct Open {
    end: Instant,
    pod: ProvenPod,
    /// Addresses of the pod; empty allows any.
    from: Vec<IpAddr>,
    /// The key that presented it first.
    holder: Option<KeyDigest>,
}

impl SingleUseTokens {
    /// Tokens expire after `lifetime`.
    pub fn new(lifetime: Duration) -> Self {
        Self { lifetime, shared: Arc::default() }
    }

    /// Calls `theft` for each token that a second key presents. Only the first call of this method counts.
    pub fn on_theft(&self, theft: impl Fn(&ProvenPod) + Send + Sync + 'static) {
        self.shared.on_theft.get_or_init(|| Box::new(theft));
    }

    /// Makes a token that proves `pod`. It is accepted from these addresses only, or from any if there are none. Secret.
    pub fn mint(&self, pod: ProvenPod, from: Vec<IpAddr>) -> String {
        let token = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>()));
        let now = Instant::now();
        let mut open = self.shared.open.lock();
        open.retain(|_, open| open.end > now);
        if open.len() >= MAX_OPEN {
            let first = open.iter().min_by_key(|(_, open)| open.end).map(|(digest, _)| *digest);
            first.and_then(|digest| open.remove(&digest));
        }
        open.insert(blake3::hash(token.as_bytes()), Open { end: now + self.lifetime, pod, from, holder: None });
        token
    }

    /// Whether a token is of this kind.
    pub fn is_one(token: &str) -> bool {
        token.starts_with(PREFIX)
    }

    fn redeem(&self, presented: &Presented<'_>) -> Result<ProvenPod, Rejection> {
        let refused = |message: String| Err(Rejection { message, retryable: false });
        let mut all = self.shared.open.lock();
        let digest = blake3::hash(presented.token.as_bytes());
        let Some(open) = all.get_mut(&digest).filter(|open| open.end > Instant::now()) else {
            return refused("the token is unknown, was shown with another key, or ended".into());
        };
        if !open.from.is_empty() && !presented.from.is_some_and(|from| open.from.iter().any(|ip| ip.to_canonical() == from.to_canonical()))
        {
            let from = presented.from.map_or_else(|| "an unknown address".to_owned(), |from| from.to_string());
            return refused(format!("the token is taken from the pod's own address only, {:?}; this call came from {from}", open.from));
        }
        match open.holder {
            None => open.holder = Some(presented.key),
            Some(holder) if holder == presented.key => {}
            Some(holder) => {
                let stolen = all.remove(&digest);
                drop(all);
                self.revoke(holder);
                if let (Some(stolen), Some(theft)) = (stolen, self.shared.on_theft.get()) {
                    theft(&stolen.pod);
                }
                return refused("the token was shown with another key before: both are refused, and the pod needs a new agent".into());
            }
        }
        Ok(open.pod.clone())
    }

    fn revoke(&self, key: KeyDigest) {
        let mut revoked = self.shared.revoked.lock();
        if revoked.len() >= MAX_REVOKED {
            let first = revoked.iter().min_by_key(|(_, at)| **at).map(|(key, _)| *key);
            first.and_then(|key| revoked.remove(&key));
        }
        revoked.insert(key, Instant::now());
    }
}

#[async_trait]
impl TokenVerifier for SingleUseTokens {
    async fn verify(&self, presented: &Presented<'_>) -> Result<ProvenPod, Rejection> {
        self.redeem(presented)
    }

    fn is_revoked(&self, key: &KeyDigest) -> bool {
        self.shared.revoked.lock().contains_key(key)
    }
}
