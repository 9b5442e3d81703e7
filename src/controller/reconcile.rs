//! Reconciles one object: decides, passes the decision to the coordinator, changes pods where needed, writes status. Idempotent: it changes
//! nothing that is already correct.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::runtime::controller::Action;
use kube::{Api, Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::calls::{ApiError, Calls};
use super::decide::{Decided, decide};
use super::failures::Failures;
use super::hold::may_wait;
use super::launch::{Launched, Launcher};
use super::metrics::{Cause, ControllerMetrics, Outcome};
use super::object::{Object, Unreadable};
use super::objects::{Objects, Written};
use super::pods::Pods;
use super::readiness::{present, verdicts};
use super::report::{self, Facts};
use super::stores::Scope;
use super::wedged::{Wedged, wedged};
use crate::api::{WeightSync, WeightSyncStatus};
use crate::controller::lease::Leadership;
use weightsync_coordinator::{CoordinatorEvent, EventSink};
use weightsync_core::membership::MembershipView;
use weightsync_core::protocol::Reason;

/// Field manager of the status except `epoch` and `term`.
const MANAGER: &str = "weightsync-controller";
/// An object is reconciled this often even if nothing changed.
const RESYNC: Duration = Duration::from_secs(60);
/// Concurrent writes to pods of one object.
const WRITES: usize = 8;

/// How often a status is written again that somebody was ahead of.
const TRIES: u32 = 5;

#[derive(Debug, thiserror::Error)]
pub(super) enum ReconcileError {
    #[error(transparent)]
    Api(#[from] ApiError),
}

pub(super) struct Shared {
    pub(super) client: kube::Client,
    pub(super) calls: Calls,
    pub(super) objects: Arc<Objects>,
    pub(super) launcher: Launcher,
    pub(super) leadership: Leadership,
    pub(super) metrics: ControllerMetrics,
    pub(super) failures: Failures,
}

pub(super) struct ScopeContext {
    pub(super) shared: Arc<Shared>,
    pub(super) scope: Scope,
}

/// Reconciles one object. Boxed, so that its many borrows do not show in the type of the loop.
pub(super) fn reconcile(object: Arc<Object>, context: Arc<ScopeContext>) -> BoxFuture<'static, Result<Action, ReconcileError>> {
    observed(object, context).boxed()
}

/// Reconciles one object, with count and time as metrics.
async fn observed(object: Arc<Object>, context: Arc<ScopeContext>) -> Result<Action, ReconcileError> {
    let shared = &context.shared;
    let Some(term) = shared.leadership.term() else {
        // Leadership ended or is not settled; the process ends, or all objects are reconciled again.
        return Ok(Action::await_change());
    };
    let begun = Instant::now();
    shared.metrics.in_flight.inc();
    let outcome = match &object.0 {
        Ok(readable) => context.look(&Arc::new(readable.clone()), term).await,
        Err(unreadable) => context.unreadable(unreadable).await,
    };
    shared.metrics.in_flight.dec();
    shared.metrics.reconcile_duration.observe(begun.elapsed().as_secs_f64());
    let word = if outcome.is_ok() { "success" } else { "error" };
    shared.metrics.reconciles.get_or_create(&Outcome { outcome: word }).inc();
    if outcome.is_ok() {
        shared.failures.succeeded(&uid_of(&object));
    }
    outcome
}

/// How long to wait after a failure: doubles for this object alone.
pub(super) fn after_failure(object: Arc<Object>, error: &ReconcileError, context: Arc<ScopeContext>) -> Action {
    let ReconcileError::Api(cause) = error;
    let reason = if cause.is_conflict() {
        "conflict"
    } else if cause.status().is_some() {
        "refused"
    } else {
        "unreachable"
    };
    context.shared.metrics.reconcile_errors.get_or_create(&Cause { reason }).inc();
    let wait = context.shared.failures.failed(&uid_of(&object));
    tracing::warn!(namespace = object.meta().namespace, name = object.meta().name, %error, ?wait, "reconcile failed; it is repeated after the wait");
    Action::requeue(wait)
}

fn uid_of(object: &Object) -> String {
    object.meta().uid.clone().unwrap_or_default()
}

impl ScopeContext {
    /// The decision for the object, from the watch caches.
    pub(super) fn decide(&self, object: &WeightSync) -> (Decided, Vec<Arc<Pod>>) {
        let namespace = object.namespace().unwrap_or_default();
        let pods = self.scope.pods_in(&namespace);
        let others = self.scope.objects_in(&namespace);
        let others: Vec<&WeightSync> = others.iter().filter_map(|other| other.0.as_ref().ok()).collect();
        let known: Vec<&Pod> = pods.iter().map(AsRef::as_ref).collect();
        (decide(object, &others, &known, &self.shared.objects.registered(object)), pods)
    }

    async fn look(&self, object: &Arc<WeightSync>, term: u64) -> Result<Action, ReconcileError> {
        let shared = &self.shared;
        let (namespace, uid) = (object.namespace().unwrap_or_default(), object.uid().unwrap_or_default());
        let (decided, pods) = self.decide(object);
        let view = shared.objects.follow(object, &decided, term, &self.scope);

        let writes = Pods::new(shared.client.clone(), shared.calls, &namespace);
        let launched = shared.launcher.launch(object, &decided, &pods, &writes, &shared.objects.events_of(object), &view).await;
        let gates = self.open_gates(object, &view, &pods, &writes).await;
        let (replaced, wedged) = self.replace_wedged(object, &view, &pods, &writes).await;
        let mut problems = launched.as_ref().map_or_else(|_| Vec::new(), |launched| launched.problems.clone());
        problems.extend(wedged);
        let stepped_down = shared.objects.stepped_down(&uid);
        let facts = Facts { object, decided: &decided, view: &view, problems: &problems, stepped_down: stepped_down.as_deref() };
        let written = self.write_status(object, &uid, &facts).await;

        let Launched { again, .. } = launched?;
        gates?;
        replaced?;
        let held = written?;
        let soon = [again, held, shared.objects.restart_in(&uid)].into_iter().flatten().min().unwrap_or(RESYNC);
        Ok(Action::requeue(soon.max(Duration::from_millis(100)).min(RESYNC)))
    }

    async fn open_gates(&self, object: &WeightSync, view: &MembershipView, pods: &[Arc<Pod>], writes: &Pods) -> Result<(), ApiError> {
        // Two objects that both wrote one pod's gate would overwrite each other without end.
        let uid = object.uid().unwrap_or_default();
        let claimed: Vec<&Pod> = pods.iter().map(AsRef::as_ref).filter(|pod| self.shared.objects.claims(&uid, pod)).collect();
        let verdicts = verdicts(object, view, &claimed);
        let mut written = Vec::new();
        for pod in pods {
            if let Some(verdict) = pod.uid().and_then(|uid| verdicts.get(&uid)).filter(|verdict| present(pod) != Some(verdict.ready)) {
                written.push(writes.set_readiness(pod, verdict).boxed());
            }
        }
        let outcomes: Vec<Result<(), ApiError>> = futures::stream::iter(written).buffer_unordered(WRITES).collect().await;
        outcomes.into_iter().collect()
    }

    /// Deletes pods whose engine is wedged, if the object requests that; returns what users must do otherwise.
    async fn replace_wedged(
        &self,
        object: &WeightSync,
        view: &MembershipView,
        pods: &[Arc<Pod>],
        writes: &Pods,
    ) -> (Result<(), ApiError>, Vec<(Reason, String)>) {
        let known: Vec<&Pod> = pods.iter().map(AsRef::as_ref).collect();
        let Wedged { delete, problems } = wedged(object, view, &known);
        for (pod, why) in delete {
            if let Err(error) = writes.delete(pod).await {
                return (Err(error), problems);
            }
            let message = format!("pod {} was deleted because of update.onWedged RestartPod: {why}", pod.name_any());
            tracing::warn!(pod = pod.name_any(), why, "deleted a pod whose engine is wedged");
            let event = CoordinatorEvent { reason: Reason::EngineWedged, message, member: None, warning: true };
            self.shared.objects.events_of(object).publish(event);
        }
        (Ok(()), problems)
    }

    /// Writes the status if it differs from the stored one; returns how long the write may wait, if it may.
    async fn write_status(&self, object: &WeightSync, uid: &str, facts: &Facts<'_>) -> Result<Option<Duration>, ApiError> {
        let stored = || object.status.clone().map(|status| WeightSyncStatus { epoch: None, term: None, ..status });
        // A cache with the last write shows later changes of others.
        let written = self.shared.objects.written(uid).filter(|written| written.is_newer_than(object));
        let known = written.as_ref().and_then(|written| written.at.clone());
        let before = written.map(|written| written.status).or_else(stored);
        let status = match (&facts.decided.refused, &before) {
            (Some((Reason::InvalidSpec, message)), Some(before)) if !self.shared.objects.runs(uid) => {
                report::not_followed(message, object.metadata.generation, before, Timestamp::now())
            }
            _ => {
                let conditions = before.as_ref().map_or(&[][..], |status| status.conditions.as_slice());
                report::status(facts, conditions, Timestamp::now())
            }
        };
        if before.as_ref() == Some(&status) {
            self.shared.objects.hold_no_more(uid);
            return Ok(None);
        }
        if before.is_some_and(|before| may_wait(&before, &status, facts.view))
            && let Some(left) = self.shared.objects.hold(uid)
        {
            return Ok(Some(left));
        }
        let at = self.apply_status(object.meta(), known, &status).await?;
        self.shared.objects.set_written(uid, Written { status, at });
        Ok(None)
    }

    /// Reports in the status of an object that cannot be parsed what is wrong with it. The rest of the status, its group and its agents
    /// stay unchanged.
    async fn unreadable(&self, object: &Unreadable) -> Result<Action, ReconcileError> {
        self.shared.objects.hold_unreadable(object);
        let status = report::unreadable(object, Timestamp::now());
        if status != object.status {
            // Fields of another field manager.
            let ours: Map<String, Value> = status.into_iter().filter(|(field, _)| field != "epoch" && field != "term").collect();
            self.apply_status(&object.metadata, None, &ours).await?;
        }
        Ok(Action::await_change())
    }

    /// Applies the status to this object; returns its new resourceVersion, or `None` if the object is gone, or another one of its name is there.
    ///
    /// The API server ignores the UID in an apply patch of a custom resource's status (run: Kubernetes 1.36.3). So the patch names the version
    /// that it is of, which no other object has.
    async fn apply_status(
        &self,
        meta: &kube::core::ObjectMeta,
        known: Option<String>,
        status: &(impl Serialize + Sync),
    ) -> Result<Option<String>, ApiError> {
        let (name, namespace) = (meta.name.clone().unwrap_or_default(), meta.namespace.clone().unwrap_or_default());
        let api: Api<DynamicObject> = Api::namespaced_with(self.shared.client.clone(), &namespace, &ApiResource::erase::<WeightSync>(&()));
        let params = PatchParams::apply(MANAGER).force();
        let mut version = known.or_else(|| meta.resource_version.clone());
        let mut tried = 0;
        loop {
            let patch = Patch::Apply(json!({
                "apiVersion": WeightSync::api_version(&()),
                "kind": WeightSync::kind(&()),
                "metadata": {"name": name, "uid": meta.uid, "resourceVersion": version},
                "status": status,
            }));
            let what = format!("write the status of {namespace}/{name}");
            match self.shared.calls.run(what, api.patch_status(&name, &params, &patch)).await {
                Err(error) if error.is_gone() => return Ok(None),
                // Somebody wrote since, such as this controller an epoch: the status is right all the same, if it is still that object.
                Err(error) if error.is_conflict() && tried < TRIES => {
                    tried += 1;
                    // `list` with a name is a read of one object that needs no right to `get`.
                    let one = ListParams::default().fields(&format!("metadata.name={name}"));
                    let read = self.shared.calls.run(format!("read WeightSync {namespace}/{name}"), api.list(&one)).await?;
                    let Some(same) = read.items.into_iter().find(|object| object.metadata.uid == meta.uid) else { return Ok(None) };
                    version = same.metadata.resource_version;
                }
                outcome => return outcome.map(|object| object.metadata.resource_version),
            }
        }
    }
}
