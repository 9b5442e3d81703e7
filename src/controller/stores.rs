//! The observed state: all objects and all opted-in pods of the watched namespaces, kept up to date by watches. Decides only which objects
//! to reconcile after a change. An object that cannot be parsed is kept as such and does not stop the others.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, reflector};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio_util::task::AbortOnDropHandle;

use super::decide::Selection;
use super::metrics::{Broken, ControllerMetrics, Kind, Watched};
use super::object::Object;
use super::triggers::Triggers;
use crate::watching::watch;
use weightsync_core::plan::{ROLE_LABEL, ROLE_ROLLOUT, ROLE_TRAINER};

/// Objects and pods of one namespace, or of all.
#[derive(Clone)]
pub(super) struct Scope {
    pub(super) objects: Store<Object>,
    pub(super) pods: Store<Pod>,
    pub(super) triggers: Triggers,
}

/// UIDs of all objects in the watch caches.
pub(super) fn known_objects(scopes: &[Scope]) -> HashSet<String> {
    scopes.iter().flat_map(|scope| scope.objects.state()).filter_map(|object| object.meta().uid.clone()).collect()
}

/// All scopes, kept up to date until this is dropped.
pub(super) struct Stores {
    pub(super) scopes: Vec<Scope>,
    /// Ends them when dropped.
    watches: Vec<AbortOnDropHandle<()>>,
}

impl Stores {
    /// Watches the namespaces, or the whole cluster if there are none.
    pub(super) fn start(client: &Client, namespaces: &[String], metrics: &ControllerMetrics) -> Self {
        let mut stores = Self { scopes: Vec::new(), watches: Vec::new() };
        if namespaces.is_empty() {
            stores.add(Api::all(client.clone()), Api::all(client.clone()), metrics);
        }
        for namespace in namespaces {
            stores.add(Api::namespaced(client.clone(), namespace), Api::namespaced(client.clone(), namespace), metrics);
        }
        stores
    }

    fn add(&mut self, objects: Api<Object>, pods: Api<Pod>, metrics: &ControllerMetrics) {
        let opted_in = watcher::Config::default().labels(&format!("{ROLE_LABEL} in ({ROLE_TRAINER},{ROLE_ROLLOUT})"));
        let triggers = Triggers::default();
        let (object_store, object_writer) = reflector::store();
        let (pod_store, pod_writer) = reflector::store();
        let scope = Scope { objects: object_store, pods: pod_store, triggers: triggers.clone() };

        let changed = triggers.clone();
        self.watch("WeightSync", objects, watcher::Config::default(), object_writer, metrics, move |event, _| {
            if let Event::Apply(object) | Event::InitApply(object) | Event::Delete(object) = event {
                changed.push(ObjectRef::from_obj(object));
            }
        });
        let known = scope.objects.clone();
        self.watch("Pod", pods, opted_in, pod_writer, metrics, move |event, before| {
            let affected = match event {
                Event::Apply(pod) | Event::Delete(pod) => concerned(&known, pod, before),
                // A pod may disappear without its own event.
                Event::InitDone => known.state(),
                Event::Init | Event::InitApply(_) => return,
            };
            for object in affected {
                triggers.push(ObjectRef::from_obj(&*object));
            }
        });
        self.scopes.push(scope);
    }

    fn watch<K>(
        &mut self,
        kind: &'static str,
        api: Api<K>,
        config: watcher::Config,
        mut writer: reflector::store::Writer<K>,
        metrics: &ControllerMetrics,
        changed: impl Fn(&Event<K>, Option<&K>) + Send + 'static,
    ) where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let metrics = metrics.clone();
        let store = writer.as_reader();
        let events = watch(api, config)
            // Half of a pod's bytes, and not used here.
            .modify(|object: &mut K| object.managed_fields_mut().clear());
        let task = async move {
            let mut events = std::pin::pin!(events);
            while let Some(event) = events.next().await {
                match event {
                    Ok(event) => {
                        let op = operation(&event);
                        let before = match &event {
                            Event::Apply(object) => store.get(&ObjectRef::from_obj(object)),
                            _ => None,
                        };
                        writer.apply_watcher_event(&event);
                        metrics.watch_events.get_or_create(&Watched { kind, op }).inc();
                        let known = i64::try_from(store.len()).unwrap_or(i64::MAX);
                        metrics.cached.get_or_create(&Kind { kind }).set(known);
                        changed(&event, before.as_deref());
                    }
                    Err(error) => {
                        metrics.watch_errors.get_or_create(&Broken { kind, error: cause(&error) }).inc();
                        tracing::warn!(kind, %error, "the watch broke; it is opened again");
                    }
                }
            }
        };
        self.watches.push(AbortOnDropHandle::new(tokio::spawn(task)));
    }

    /// The highest term in the status of any object: leaders of an earlier Lease had it.
    pub(super) fn highest_term(&self) -> impl Fn() -> Option<u64> + Send + Sync + 'static {
        let stores: Vec<Store<Object>> = self.scopes.iter().map(|scope| scope.objects.clone()).collect();
        move || stores.iter().flat_map(Store::state).filter_map(|object| object.term()).max()
    }

    /// Waits until everything was listed once.
    pub(super) async fn synced(&self) -> bool {
        for scope in &self.scopes {
            if scope.objects.wait_until_ready().await.is_err() || scope.pods.wait_until_ready().await.is_err() {
                return false;
            }
        }
        true
    }
}

impl Scope {
    pub(super) fn objects_in(&self, namespace: &str) -> Vec<Arc<Object>> {
        self.objects.state_filter(|object| object.meta().namespace.as_deref() == Some(namespace))
    }

    /// Opted-in pods of a namespace.
    pub(super) fn pods_in(&self, namespace: &str) -> Vec<Arc<Pod>> {
        self.pods.state_filter(|pod| pod.metadata.namespace.as_deref() == Some(namespace))
    }
}

/// Objects that select a pod, by its labels now or before. All others in its namespace need no reconcile: there may be hundreds.
pub(super) fn concerned(objects: &Store<Object>, pod: &Pod, before: Option<&Pod>) -> Vec<Arc<Object>> {
    objects.state_filter(|object| {
        let Ok(readable) = &object.0 else { return false };
        if readable.metadata.namespace != pod.metadata.namespace {
            return false;
        }
        let selection = Selection::of(readable);
        selection.holds(pod.labels()) || before.is_some_and(|before| before.labels() != pod.labels() && selection.holds(before.labels()))
    })
}

fn operation<K>(event: &Event<K>) -> &'static str {
    match event {
        Event::Apply(_) => "apply",
        Event::Delete(_) => "delete",
        Event::Init => "init",
        Event::InitApply(_) => "list",
        Event::InitDone => "listed",
    }
}

/// The kind of a watch error, for metrics.
fn cause(error: &watcher::Error) -> &'static str {
    match error {
        watcher::Error::InitialListFailed(_) => "list",
        watcher::Error::WatchStartFailed(_) => "start",
        watcher::Error::WatchError(_) => "status",
        watcher::Error::WatchFailed(_) => "stream",
        watcher::Error::NoResourceVersion => "version",
    }
}
