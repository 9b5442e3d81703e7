//! One leader at a time, by a `coordination.k8s.io` Lease. Decides which process leads, and its term. A leader's claim never lasts longer
//! than other candidates have to wait.
//!
//! After the design of kubert's lease (`olix0r/kubert`, kubert/src/lease.rs): every write carries the `resourceVersion` that was read,
//! every call has its own deadline, and users get a [`Claim`] with an expiry that they check themselves. A flag that must be turned off
//! would stay on when the API server stops responding. Time is the local monotonic clock: a foreign claim expires when it was not renewed
//! for its duration *as seen from here*, so clocks of two nodes are never compared.

#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

#[derive(Debug, Clone)]
pub struct LeaseConfig {
    pub name: String,
    /// Identity of this process: the pod's name. Two processes must never run under one name at once.
    pub holder: String,
    /// A claim ends if it is not renewed for this time.
    pub duration: Duration,
    /// A held lease is renewed this often; a free one is tried this often.
    pub period: Duration,
    /// Each call to the API server ends within this long.
    pub call: Duration,
}

impl LeaseConfig {
    /// 15 s, renewed every 3 s, calls of at most 5 s: an API server that needs 5 s for a response ends no leadership.
    pub fn new(name: impl Into<String>, holder: impl Into<String>) -> Self {
        let seconds = Duration::from_secs;
        Self { name: name.into(), holder: holder.into(), duration: seconds(15), period: seconds(3), call: seconds(5) }
    }
}

/// The leadership of one process: holder, expiry and term.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub holder: String,
    /// Expiry, if it is not renewed.
    pub expiry: Instant,
    /// Transitions of the lease: every new leader has a higher one than each leader before it.
    pub term: u64,
}

impl Claim {
    /// Whether `holder` leads now. Check it immediately before each action that only a leader may take.
    pub fn is_current_for(&self, holder: &str) -> bool {
        self.holder == holder && Instant::now() < self.expiry
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseLost {
    #[error("the lease could not be renewed in time: {0}")]
    NotRenewed(String),
    #[error("{holder} took the lease (term {term})")]
    Taken { holder: String, term: u64 },
    #[error("stopped by a signal")]
    Stopped,
}

/// The claim as its user sees it. Clones see the same.
#[derive(Debug, Clone)]
pub struct Leadership {
    holder: String,
    claim: watch::Receiver<Option<Claim>>,
}

impl Leadership {
    /// The term in which this process leads now; `None` if it does not.
    pub fn term(&self) -> Option<u64> {
        let claim = self.claim.borrow();
        claim.as_ref().filter(|claim| claim.is_current_for(&self.holder)).map(|claim| claim.term)
    }

    /// Waits until this process leads, and returns its term; `None` if the lease's task ended.
    pub async fn acquired(&mut self) -> Option<u64> {
        loop {
            if let Some(term) = self.term() {
                return Some(term);
            }
            self.claim.changed().await.ok()?;
        }
    }

    /// Waits until this process leads no more, whatever the lease's task does meanwhile.
    pub async fn lost(&mut self) {
        while self.term().is_some() {
            let expiry = self.claim.borrow().as_ref().map_or_else(Instant::now, |claim| claim.expiry);
            tokio::select! {
                () = sleep_until(expiry) => {}
                changed = self.claim.changed() => if changed.is_err() {
                    sleep_until(expiry).await;
                },
            }
        }
    }
}

/// The highest term that a Lease can store.
const TERMS: u64 = (1 << 31) - 1;

/// Takes the lease, keeps it, and releases it.
pub struct LeaseManager {
    api: Api<Lease>,
    config: LeaseConfig,
    claim: watch::Sender<Option<Claim>>,
    /// The Lease as last read or written, and when its last change was seen.
    seen: Option<(Lease, Instant)>,
    /// When a renewal without a response was sent.
    unanswered: Option<Instant>,
    renew_failures: Box<dyn Fn() + Send + Sync>,
    floor: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

enum CallFailed {
    Conflict,
    NotFound,
    Other(String),
}

impl LeaseManager {
    /// `api` must come from a client without hidden retries (`kube::Config::default_retry = false`): each call here has its own deadline.
    pub fn new(api: Api<Lease>, config: LeaseConfig) -> Self {
        Self {
            api,
            config,
            claim: watch::Sender::new(None),
            seen: None,
            unanswered: None,
            renew_failures: Box::new(|| {}),
            floor: Box::new(|| None),
        }
    }

    /// Whenever the lease is taken, `highest` returns the highest known term of an earlier leader. The new term is above it, even if the
    /// Lease was deleted, belongs to another release, or was recreated.
    #[must_use]
    pub fn above(mut self, highest: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Self {
        self.floor = Box::new(highest);
        self
    }

    /// Calls `count` for each call that failed while the lease was held.
    #[must_use]
    pub fn count_failures(mut self, count: impl Fn() + Send + Sync + 'static) -> Self {
        self.renew_failures = Box::new(count);
        self
    }

    /// The claim for users of the lease.
    pub fn leadership(&self) -> Leadership {
        Leadership { holder: self.config.holder.clone(), claim: self.claim.subscribe() }
    }

    /// Waits for the lease and keeps it until it is lost or `cancel`. The process must end its work as a leader when this returns; with
    /// [`LeaseLost::Stopped`] it calls [`release`](Self::release) after that.
    pub async fn run(&mut self, cancel: &CancellationToken) -> LeaseLost {
        let lost = tokio::select! {
            () = cancel.cancelled() => return LeaseLost::Stopped,
            lost = self.hold() => lost,
        };
        self.claim.send_replace(None);
        lost
    }

    async fn hold(&mut self) -> LeaseLost {
        let term = loop {
            match self.try_acquire().await {
                Ok(Some(term)) => break term,
                Ok(None) => {}
                Err(cause) => tracing::warn!(lease = %self.config.name, cause, "the lease cannot be acquired"),
            }
            sleep(self.config.period).await;
        };
        tracing::info!(lease = %self.config.name, term, "leading");
        let mut failure = String::new();
        loop {
            let expiry = self.claim.borrow().as_ref().map_or_else(Instant::now, |claim| claim.expiry);
            let pause = if failure.is_empty() { self.config.period } else { self.config.period / 5 };
            sleep_until((Instant::now() + pause).min(expiry)).await;
            if Instant::now() >= expiry {
                // Without a failed call, this process itself was stopped for that time.
                return LeaseLost::NotRenewed(if failure.is_empty() { "this process stood still".into() } else { failure });
            }
            match self.renew(term).await {
                Ok(None) => failure.clear(),
                Ok(Some(lost)) => return lost,
                Err(cause) => {
                    tracing::warn!(lease = %self.config.name, cause, "the lease cannot be renewed");
                    (self.renew_failures)();
                    failure = cause;
                }
            }
        }
    }

    /// Releases the lease, so that the next leader need not wait for its expiry. Call it after the last action as a leader.
    pub async fn release(&mut self) {
        let held = self.claim.send_replace(None);
        let Some((lease, _)) = self.seen.take() else { return };
        if held.is_none_or(|claim| !claim.is_current_for(&self.config.holder)) {
            return;
        }
        let mut free = lease;
        let spec = free.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        let given_back = self.write(&free).await.is_ok();
        tracing::info!(lease = %self.config.name, given_back, "leading no more");
    }

    /// Reads the lease, and takes it if it is free, expired, or was held by an earlier process of this pod.
    async fn try_acquire(&mut self) -> Result<Option<u64>, String> {
        let before = Instant::now();
        let lease = match self.read().await {
            Ok(lease) => lease,
            Err(CallFailed::NotFound) => {
                let fresh = Lease {
                    metadata: ObjectMeta { name: Some(self.config.name.clone()), ..ObjectMeta::default() },
                    spec: Some(self.spec(self.next_term(None), now())),
                };
                return match self.create(&fresh).await {
                    Ok(created) => Ok(Some(self.claimed(created, before))),
                    Err(CallFailed::Other(cause)) => Err(cause),
                    Err(_) => Ok(None),
                };
            }
            Err(CallFailed::Conflict) => return Ok(None),
            Err(CallFailed::Other(cause)) => return Err(cause),
        };
        let since = self.see(&lease);
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        let duration = Duration::from_secs(u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0));
        let free = holder.is_empty() || holder == self.config.holder || Instant::now() >= since + duration;
        if !free {
            self.claim.send_replace(Some(Claim { holder, expiry: since + duration, term: term_of(&lease) }));
            return Ok(None);
        }
        // Also under our own name: an earlier process of this pod may have started actions in its term.
        let mut taken = lease;
        taken.spec = Some(self.spec(self.next_term(Some(term_of(&taken))), now()));
        let before = Instant::now();
        match self.write(&taken).await {
            Ok(written) => Ok(Some(self.claimed(written, before))),
            Err(CallFailed::Other(cause)) => Err(cause),
            Err(_) => Ok(None),
        }
    }

    async fn renew(&mut self, term: u64) -> Result<Option<LeaseLost>, String> {
        let Some((lease, _)) = self.seen.clone() else { return Err("the lease was not read".into()) };
        match self.write_renewal(lease).await {
            Ok(()) => return Ok(None),
            Err(CallFailed::Other(cause)) => return Err(cause),
            Err(CallFailed::Conflict | CallFailed::NotFound) => {}
        }
        // Written since: by this process (a write without a response), or by another leader.
        let lease = match self.read().await {
            Ok(lease) => lease,
            Err(CallFailed::NotFound) => return Ok(Some(LeaseLost::Taken { holder: "no one".into(), term: 0 })),
            Err(CallFailed::Conflict) => return Err("conflict".into()),
            Err(CallFailed::Other(cause)) => return Err(cause),
        };
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
        if holder == self.config.holder && term_of(&lease) == term {
            match self.unanswered.take() {
                // The earlier write succeeded, and counts from when it was sent.
                Some(sent) => _ = self.claimed(lease.clone(), sent),
                None => _ = self.see(&lease),
            }
            // That may be long ago: renew again.
            return match self.write_renewal(lease).await {
                Ok(()) => Ok(None),
                Err(CallFailed::Other(cause)) => Err(cause),
                Err(CallFailed::Conflict | CallFailed::NotFound) => Err("written by another call of this process".into()),
            };
        }
        Ok(Some(LeaseLost::Taken { holder, term: term_of(&lease) }))
    }

    /// Renews `lease` as it was last read or written, and records since when the claim may hold. Of several calls without a response any
    /// one may have succeeded, so only the first counts.
    async fn write_renewal(&mut self, mut lease: Lease) -> Result<(), CallFailed> {
        if let Some(spec) = &mut lease.spec {
            spec.renew_time = Some(MicroTime(now()));
        }
        let before = Instant::now();
        match self.write(&lease).await {
            Ok(written) => {
                self.unanswered = None;
                self.claimed(written, before);
                Ok(())
            }
            Err(failed @ CallFailed::Other(_)) => {
                self.unanswered.get_or_insert(before);
                Err(failed)
            }
            Err(failed) => Err(failed),
        }
    }

    /// A term above that of the Lease and above every other known one; 0 if there is none.
    fn next_term(&self, of_lease: Option<u64>) -> u64 {
        // The Lease stores 31 bits: an invalid number must not use them up.
        let known = (self.floor)().filter(|term| *term < TERMS / 2);
        of_lease.into_iter().chain(known).max().map_or(0, |term| term.saturating_add(1).min(TERMS))
    }

    fn spec(&self, term: u64, at: Timestamp) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.config.holder.clone()),
            lease_duration_seconds: Some(i32::try_from(self.config.duration.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: Some(MicroTime(at)),
            renew_time: Some(MicroTime(at)),
            lease_transitions: Some(i32::try_from(term).unwrap_or(i32::MAX)),
            ..LeaseSpec::default()
        }
    }

    /// Records a written claim. It counts from *before* the call, because others may have seen it since then.
    fn claimed(&mut self, lease: Lease, before: Instant) -> u64 {
        let term = term_of(&lease);
        self.seen = Some((lease, before));
        self.claim.send_replace(Some(Claim { holder: self.config.holder.clone(), expiry: before + self.config.duration, term }));
        term
    }

    /// Since when the lease is unchanged, as seen by this process.
    fn see(&mut self, lease: &Lease) -> Instant {
        let version = &lease.metadata.resource_version;
        let since = match &self.seen {
            Some((known, since)) if &known.metadata.resource_version == version => *since,
            _ => Instant::now(),
        };
        self.seen = Some((lease.clone(), since));
        since
    }

    async fn read(&self) -> Result<Lease, CallFailed> {
        self.call(self.api.get(&self.config.name)).await
    }

    async fn create(&self, lease: &Lease) -> Result<Lease, CallFailed> {
        self.call(self.api.create(&PostParams::default(), lease)).await
    }

    /// Replaces the Lease if it was not written since it was read: `lease` carries its `resourceVersion`.
    async fn write(&self, lease: &Lease) -> Result<Lease, CallFailed> {
        self.call(self.api.replace(&self.config.name, &PostParams::default(), lease)).await
    }

    async fn call(&self, call: impl Future<Output = Result<Lease, kube::Error>>) -> Result<Lease, CallFailed> {
        match timeout(self.config.call, call).await {
            Ok(Ok(lease)) => Ok(lease),
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() || status.is_already_exists() => Err(CallFailed::Conflict),
            Ok(Err(kube::Error::Api(status))) if status.is_not_found() => Err(CallFailed::NotFound),
            Ok(Err(error)) => Err(CallFailed::Other(error.to_string())),
            Err(_) => Err(CallFailed::Other(format!("no response within {:?}", self.config.call))),
        }
    }
}

fn term_of(lease: &Lease) -> u64 {
    let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
    u64::try_from(transitions.unwrap_or(0)).unwrap_or(0)
}

fn now() -> Timestamp {
    Timestamp::now()
}
