//! Decides which pod a token proves: a projected token by the cluster's TokenReview, a single-use one by the records of this controller.

use std::collections::BTreeMap;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::calls::Calls;
use weightsync_coordinator::{Presented, ProvenPod, SingleUseTokens, TokenVerifier};
use weightsync_core::protocol::Rejection;
use weightsync_net::identity::KeyDigest;

/// Audience of agents' projected tokens: a token for another audience proves nothing here.
pub(super) const AUDIENCE: &str = "weightsync.dev";

/// Concurrent reviews. Thousands of agents that enrol at the same time would otherwise all miss their deadline at the API server. An agent
/// that does not get a slot asks again, and has cost nothing.
const AT_ONCE: usize = 32;

pub(super) struct Tokens {
    reviews: Api<TokenReview>,
    calls: Calls,
    minted: SingleUseTokens,
    turns: Semaphore,
}

impl Tokens {
    pub(super) fn new(client: Client, calls: Calls, minted: SingleUseTokens) -> Self {
        Self { reviews: Api::all(client), calls, minted, turns: Semaphore::new(AT_ONCE) }
    }
}

#[async_trait]
impl TokenVerifier for Tokens {
    async fn verify(&self, presented: &Presented<'_>) -> Result<ProvenPod, Rejection> {
        let token = presented.token;
        if SingleUseTokens::is_one(token) {
            return self.minted.verify(presented).await;
        }
        says_so_itself(token, presented.pod_uid).map_err(|message| Rejection { message, retryable: false })?;
        let later = |message: String| Rejection { message: format!("the token cannot be checked now: {message}"), retryable: true };
        let _turn = self.turns.acquire().await.map_err(|error| later(error.to_string()))?;
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![AUDIENCE.to_owned()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer = self.calls.run("review an agent's token", self.reviews.create(&PostParams::default(), &review)).await;
        let review = answer.map_err(|error| later(error.to_string()))?;
        proven(&review.status.unwrap_or_default()).map_err(|message| Rejection { message, retryable: false })
    }

    fn is_revoked(&self, key: &KeyDigest) -> bool {
        self.minted.is_revoked(key)
    }
}

/// Whether a token's own claims name this audience and that pod. This proves nothing; but a token with other claims needs no call to the
/// API server.
pub(super) fn says_so_itself(token: &str, pod_uid: &str) -> Result<(), String> {
    let not_one = || "the token is no projected token of a service account".to_owned();
    let mut parts = token.split('.');
    let (Some(_), Some(claims), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else { return Err(not_one()) };
    let claims = URL_SAFE_NO_PAD.decode(claims).map_err(|_| not_one())?;
    let claims: Value = serde_json::from_slice(&claims).map_err(|_| not_one())?;
    let audiences = claims.get("aud").map(|audience| match audience {
        Value::Array(all) => all.iter().any(|one| one == AUDIENCE),
        one => one == AUDIENCE,
    });
    if audiences != Some(true) {
        return Err(format!("the token is not for the audience {AUDIENCE}"));
    }
    let of = claims.pointer("/kubernetes.io/pod/uid").and_then(Value::as_str);
    if of != Some(pod_uid) {
        return Err(format!("the token is not of the pod with UID {pod_uid}"));
    }
    Ok(())
}

/// Reads a review. An API server without support for audiences omits them, and then the token proves nothing.
pub(super) fn proven(status: &TokenReviewStatus) -> Result<ProvenPod, String> {
    if status.authenticated != Some(true) {
        return Err(format!("the token is not valid: {}", status.error.as_deref().unwrap_or("not authenticated")));
    }
    if !status.audiences.iter().flatten().any(|audience| audience == AUDIENCE) {
        return Err(format!("the token is not for the audience {AUDIENCE}"));
    }
    let user = status.user.clone().unwrap_or_default();
    let username = user.username.unwrap_or_default();
    let parts: Vec<&str> = username.split(':').collect();
    let ["system", "serviceaccount", namespace, _] = parts.as_slice() else {
        return Err(format!("the token is not of a pod's service account but of {username:?}"));
    };
    let extra: BTreeMap<String, Vec<String>> = user.extra.unwrap_or_default();
    let one = |key: &str| extra.get(key).and_then(|values| values.first()).cloned();
    match (one("authentication.kubernetes.io/pod-name"), one("authentication.kubernetes.io/pod-uid")) {
        (Some(pod), Some(pod_uid)) => Ok(ProvenPod { namespace: (*namespace).to_owned(), pod, pod_uid }),
        _ => Err("the token is not bound to a pod: use a projected token".to_owned()),
    }
}
