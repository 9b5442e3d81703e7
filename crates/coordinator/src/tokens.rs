//! Tokens for agents that have no projected one: each is made for one pod, works once, and ends soon. Only digests are kept.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::enrollment::{ProvenPod, TokenVerifier};
use weightsync_core::protocol::Rejection;

/// Tokens that nobody used yet; beyond that the ones that end first are dropped.
const MAX_OPEN: usize = 4096;
/// Marks these tokens, so that they can be told from a cluster's.
const PREFIX: &str = "wst1-";

/// Makes and redeems single-use tokens. Clones share them.
#[derive(Clone)]
pub struct SingleUseTokens {
    lifetime: Duration,
    open: Arc<Mutex<HashMap<blake3::Hash, (Instant, ProvenPod)>>>,
}

impl SingleUseTokens {
    /// Tokens end after `lifetime`.
    pub fn new(lifetime: Duration) -> Self {
        Self { lifetime, open: Arc::default() }
    }

    /// Makes a token that proves to be `pod`. Secret.
    pub fn mint(&self, pod: ProvenPod) -> String {
        let token = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>()));
        let now = Instant::now();
        let mut open = self.open.lock();
        open.retain(|_, (end, _)| *end > now);
        if open.len() >= MAX_OPEN {
            let first = open.iter().min_by_key(|(_, (end, _))| *end).map(|(digest, _)| *digest);
            first.and_then(|digest| open.remove(&digest));
        }
        open.insert(blake3::hash(token.as_bytes()), (now + self.lifetime, pod));
        token
    }

    /// Whether a token is of this kind, whoever made it.
    pub fn is_one(token: &str) -> bool {
        token.starts_with(PREFIX)
    }
}

#[async_trait]
impl TokenVerifier for SingleUseTokens {
    async fn verify(&self, token: &str) -> Result<ProvenPod, Rejection> {
        let found = self.open.lock().remove(&blake3::hash(token.as_bytes()));
        match found {
            Some((end, pod)) if end > Instant::now() => Ok(pod),
            _ => Err(Rejection { message: "the token is unknown, used or ended".into(), retryable: false }),
        }
    }
}
