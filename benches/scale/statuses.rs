//! What the statuses of all objects say, as a user's watch sees them, and when.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use weightsync::api::WeightSync;

#[derive(Default)]
struct Inner {
    /// The types of conditions that hold, by object.
    holding: HashMap<String, Vec<String>>,
    /// When the end of its update was first reported.
    ends: HashMap<(String, i64), Instant>,
}

pub struct Statuses {
    inner: Arc<Mutex<Inner>>,
    _task: AbortOnDropHandle<()>,
}

impl Statuses {
    pub fn watch(client: &Client) -> Self {
        let inner: Arc<Mutex<Inner>> = Arc::default();
        let (kept, objects) = (inner.clone(), Api::<WeightSync>::all(client.clone()));
        let task = tokio::spawn(async move {
            let mut seen = std::pin::pin!(watcher(objects, watcher::Config::default()).default_backoff().applied_objects());
            while let Some(object) = seen.next().await {
                let Ok(object) = object else { continue };
                kept.lock().unwrap_or_else(PoisonError::into_inner).note(&object);
            }
        });
        Self { inner, _task: AbortOnDropHandle::new(task) }
    }

    fn read<T>(&self, read: impl FnOnce(&Inner) -> T) -> T {
        read(&self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Objects whose condition of that type holds.
    pub fn holding(&self, condition: &str) -> usize {
        self.read(|inner| inner.holding.values().filter(|holding| holding.iter().any(|kind| kind == condition)).count())
    }

    /// When an object's status first reported that the update to a version had ended.
    pub fn reported(&self, object: &str, version: u64) -> Option<Instant> {
        let key = (object.to_owned(), i64::try_from(version).ok()?);
        self.read(|inner| inner.ends.get(&key).copied())
    }
}

impl Inner {
    fn note(&mut self, object: &WeightSync) {
        let name = object.name_any();
        let Some(status) = &object.status else { return };
        let holding = status.conditions.iter().filter(|condition| condition.status == "True").map(|condition| condition.type_.clone());
        self.holding.insert(name.clone(), holding.collect());
        if let Some(update) = status.last_update.as_ref().filter(|update| update.state == "Done") {
            self.ends.entry((name, update.version)).or_insert_with(Instant::now);
        }
    }
}
