//! Gives agents their certificates and accepts their announcements. Decides whether an agent is the one that it claims to be: first by a
//! token, later by its certificate. The [`Directory`] decides which object it belongs to, never the agent.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::extract::{ConnectInfo, Extension, State};
use axum::routing::post;
use axum::{Json, Router};
use tokio::time::{sleep, timeout};

use super::directory::{Claimed, Directory};
use weightsync_core::protocol::{AnnounceResponse, Announcement, Call, EnrollRequest, EnrollResponse, RegisteredEngines, Rejection};
use weightsync_net::https::{Answered, Valid};
use weightsync_net::identity::{Ca, Identity, KeyDigest, PeerIdentity};

/// Longest check of a token.
const VERIFY: Duration = Duration::from_secs(10);

/// The pod that a token proves.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ProvenPod {
    /// Its namespace; `local` on one host.
    pub namespace: String,
    pub pod: String,
    pub pod_uid: String,
}

/// A token that an agent presents.
#[derive(Clone, Copy)]
pub struct Presented<'a> {
    /// Secret.
    pub token: &'a str,
    /// UID of the pod that it must prove.
    pub pod_uid: &'a str,
    /// Address of the caller.
    pub from: Option<IpAddr>,
    /// The key for which the agent requests a certificate.
    pub key: KeyDigest,
}

/// Returns the pod that a token proves.
#[async_trait]
pub trait TokenVerifier: Send + Sync {
    /// Fails with a [`Rejection`]: not retryable if the token proves nothing, retryable if it cannot be checked now.
    async fn verify(&self, presented: &Presented<'_>) -> Result<ProvenPod, Rejection>;

    /// Whether certificates for this key were revoked. The default is for verifiers that revoke none.
    fn is_revoked(&self, _key: &KeyDigest) -> bool {
        false
    }
}

/// The parts of the enrolment server.
#[allow(missing_docs)]
pub struct Enrollment {
    pub ca: Arc<Ca>,
    pub verifier: Arc<dyn TokenVerifier>,
    pub directory: Directory,
    /// Lifetime of certificates; agents renew after a third of it, so that a controller may be away for the rest.
    pub lifetime: Duration,
}

/// Renews the certificate of the authority's own process, as early as agents renew theirs. Runs until its task is dropped.
pub async fn keep_certified(ca: Arc<Ca>, identity: Identity, who: PeerIdentity, lifetime: Duration) {
    loop {
        sleep(lifetime / 3).await;
        let signed = identity.csr_pem().and_then(|csr| ca.sign(&csr, &who, lifetime));
        if let Err(error) = signed.and_then(|certificate| identity.install(&certificate)) {
            tracing::error!(%error, "the coordinator's own certificate cannot be renewed");
        }
    }
}

/// The routes of the calls from agents; serve them with [`Access::Open`](weightsync_net::https::Access::Open).
pub fn router(enrollment: Arc<Enrollment>) -> Router {
    Router::new()
        .route(EnrollRequest::PATH, post(enroll))
        .route(Announcement::PATH, post(announce))
        .route(RegisteredEngines::PATH, post(engines))
        .with_state(enrollment)
}

fn forbidden(message: impl Into<String>) -> Rejection {
    Rejection { message: message.into(), retryable: false }
}

async fn enroll(
    State(enrollment): State<Arc<Enrollment>>,
    peer: Option<Extension<PeerIdentity>>,
    key: Option<Extension<KeyDigest>>,
    from: Option<Extension<ConnectInfo<SocketAddr>>>,
    Valid(request): Valid<EnrollRequest>,
) -> Answered<EnrollRequest, Rejection> {
    let peer = peer.map(|Extension(peer)| peer);
    // Comes before the check of the token, because a token review costs a call to the API server.
    enrollment.directory.settled()?;
    let pod_uid = &request.incarnation.pod_uid;
    // A pod may be labelled before its object exists: its agent retries.
    let claimed = enrollment.directory.claim_of(pod_uid).map_err(|rejection| Rejection { retryable: true, ..rejection })?;
    let asked_for = KeyDigest::of_request(&request.csr_pem);
    let asked_for = asked_for.map_err(|error| forbidden(format!("the signing request cannot be served: {error}")))?;
    for shown in key.map(|Extension(key)| key).into_iter().chain([asked_for]) {
        refuse_revoked(enrollment.verifier.as_ref(), &shown)?;
    }
    let from = from.map(|Extension(ConnectInfo(from))| from.ip());
    prove(enrollment.verifier.as_ref(), peer, &request, Presented { token: &request.token, pod_uid, from, key: asked_for }).await?;
    let who = PeerIdentity::Agent { weightsync: claimed.weightsync.clone(), pod_uid: pod_uid.clone(), role: claimed.assignment.role };
    let signed = enrollment.ca.sign(&request.csr_pem, &who, enrollment.lifetime);
    let certificate_pem = signed.map_err(|error| forbidden(format!("the signing request cannot be served: {error}")))?;
    tracing::info!(namespace = %request.namespace, pod = %request.pod, %pod_uid, weightsync = %claimed.weightsync, "agent enrolled");
    Ok(Json(EnrollResponse {
        certificate_pem,
        ca_pem: enrollment.ca.certificate_pem().to_owned(),
        weightsync: claimed.weightsync,
        renew_after_ms: u64::try_from(enrollment.lifetime.as_millis() / 3).unwrap_or(u64::MAX),
        assignment: claimed.assignment,
    }))
}

fn refuse_revoked(verifier: &dyn TokenVerifier, key: &KeyDigest) -> Result<(), Rejection> {
    if verifier.is_revoked(key) {
        return Err(forbidden("the token that this certificate was given for was shown with another key too: the pod needs a new agent"));
    }
    Ok(())
}

/// A certificate of the same pod proves as much as its token. A single-use token is spent by now.
async fn prove(
    verifier: &dyn TokenVerifier,
    peer: Option<PeerIdentity>,
    request: &EnrollRequest,
    presented: Presented<'_>,
) -> Result<(), Rejection> {
    let asked = &request.incarnation.pod_uid;
    if let Some(PeerIdentity::Agent { pod_uid, .. }) = &peer {
        let same = pod_uid == asked;
        return if same { Ok(()) } else { Err(forbidden(format!("the certificate is of pod {pod_uid}, not of {asked}"))) };
    }
    let checked = timeout(VERIFY, verifier.verify(&presented)).await;
    let late = Rejection { message: "the token could not be checked in time".into(), retryable: true };
    let proven = checked.unwrap_or(Err(late))?;
    if &proven.pod_uid == asked && proven.pod == request.pod && proven.namespace == request.namespace {
        return Ok(());
    }
    Err(forbidden(format!(
        "the token is of pod {}/{} ({}), not of {}/{} ({asked})",
        proven.namespace, proven.pod, proven.pod_uid, request.namespace, request.pod
    )))
}

async fn announce(
    State(enrollment): State<Arc<Enrollment>>,
    peer: Option<Extension<PeerIdentity>>,
    key: Option<Extension<KeyDigest>>,
    from: Option<Extension<ConnectInfo<SocketAddr>>>,
    Valid(announcement): Valid<Announcement>,
) -> Answered<Announcement, Rejection> {
    let claimed = claimed(&enrollment, peer, key, &announcement.namespace, &announcement.incarnation.pod_uid)?;
    let from = from.map(|Extension(ConnectInfo(from))| from.ip());
    enrollment.directory.announce(&claimed.weightsync, from, announcement)?;
    Ok(Json(AnnounceResponse { assignment: claimed.assignment }))
}

async fn engines(
    State(enrollment): State<Arc<Enrollment>>,
    peer: Option<Extension<PeerIdentity>>,
    key: Option<Extension<KeyDigest>>,
    Valid(registered): Valid<RegisteredEngines>,
) -> Answered<RegisteredEngines, Rejection> {
    let pod_uid = &registered.incarnation.pod_uid;
    let claimed = claimed(&enrollment, peer, key, &registered.namespace, pod_uid)?;
    enrollment.directory.register(&claimed.weightsync, pod_uid, registered.ports.clone())?;
    Ok(Json(AnnounceResponse { assignment: claimed.assignment }))
}

/// The claim on the caller's pod. Fails if its certificate is of another pod, was revoked, or is of another object than the one that claims
/// the pod now.
fn claimed(
    enrollment: &Enrollment,
    peer: Option<Extension<PeerIdentity>>,
    key: Option<Extension<KeyDigest>>,
    namespace: &str,
    named: &str,
) -> Result<Claimed, Rejection> {
    let Some(Extension(PeerIdentity::Agent { weightsync, pod_uid, .. })) = peer else {
        return Err(forbidden("an announcement needs an agent's certificate; enrol first"));
    };
    if pod_uid != named {
        return Err(forbidden(format!("the certificate is of pod {pod_uid}, not of {named}")));
    }
    if let Some(Extension(key)) = key {
        refuse_revoked(enrollment.verifier.as_ref(), &key)?;
    }
    let held = |rejection| enrollment.directory.unclaimed(namespace, &pod_uid, rejection);
    let claimed = enrollment.directory.claim_of(&pod_uid).map_err(held)?;
    if claimed.weightsync != weightsync {
        return Err(forbidden(format!("the pod belongs to WeightSync {} now, not to {weightsync}; enrol again", claimed.weightsync)));
    }
    Ok(claimed)
}
