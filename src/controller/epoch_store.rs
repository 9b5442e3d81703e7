//! Writes `status.epoch` by compare-and-swap, before any agent receives it. Reads the object from the API server, never from a cache, to
//! decide whether another controller wrote it since.

use std::cmp::Ordering;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use kube::api::{ApiResource, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde_json::{Value, json};

use super::calls::Calls;
use crate::api::WeightSync;
use crate::controller::lease::Leadership;
use weightsync_coordinator::{EpochStore, PersistError};
use weightsync_core::protocol::EpochId;

/// Field manager of `status.epoch` and `status.term`: an apply of the rest of the status must not remove them.
const MANAGER: &str = "weightsync-epoch";
/// Other clients (users, this controller's status writes) may write in between.
const TRIES: u32 = 5;

pub(super) struct KubeEpochStore {
    /// Untyped: a spec that cannot be read must not stop the epoch.
    pub(super) api: Api<DynamicObject>,
    pub(super) calls: Calls,
    pub(super) leadership: Leadership,
    pub(super) name: String,
    /// Highest epoch seen in the object, for the coordinator that follows this one.
    pub(super) seen: Arc<AtomicU64>,
}

fn other(message: impl ToString) -> PersistError {
    PersistError::Other(message.to_string())
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Write,
    WrittenAlready,
    Conflict(String),
}

/// Compares the stored epoch with the one to write, in the order in which agents compare epochs. A higher term with a lower epoch is no
/// conflict: it comes from an installation whose Lease is gone. The Lease decides which controller leads, not the object.
pub(super) fn judge(found_epoch: u64, found_term: u64, id: &EpochId) -> Found {
    match (found_epoch, found_term).cmp(&(id.epoch, id.term)) {
        Ordering::Less => Found::Write,
        Ordering::Equal => Found::WrittenAlready,
        Ordering::Greater => Found::Conflict(format!(
            "another controller (term {found_term}) wrote epoch {found_epoch} of this object; this one (term {}) wanted to write {}. If this \
             repeats, two installations watch the namespace: remove one",
            id.term, id.epoch
        )),
    }
}

fn number(object: &DynamicObject, field: &str) -> u64 {
    object.data.get("status").and_then(|status| status.get(field)).and_then(Value::as_u64).unwrap_or(0)
}

impl KubeEpochStore {
    pub(super) fn new(client: Client, calls: Calls, leadership: Leadership, namespace: &str, name: &str) -> Self {
        let resource = ApiResource::erase::<WeightSync>(&());
        let api = Api::namespaced_with(client, namespace, &resource);
        Self { api, calls, leadership, name: name.to_owned(), seen: Arc::default() }
    }

    async fn try_once(&self, id: &EpochId) -> Result<bool, PersistError> {
        // `list` with a name is a read of one object that needs no right to `get`.
        let params = ListParams::default().fields(&format!("metadata.name={}", self.name));
        let found = self.calls.run(format!("read WeightSync {}", self.name), self.api.list(&params)).await.map_err(other)?;
        let found = found.items.into_iter().find(|object| object.metadata.uid.as_deref() == Some(&id.weightsync));
        let object = found.ok_or_else(|| other("the object is gone"))?;
        let (epoch, term) = (number(&object, "epoch"), number(&object, "term"));
        self.seen.fetch_max(epoch, SeqCst);
        match judge(epoch, term, id) {
            Found::WrittenAlready => return Ok(true),
            Found::Conflict(message) => return Err(PersistError::Conflict(message)),
            Found::Write => {}
        }
        if self.leadership.term() != Some(id.term) {
            return Err(PersistError::Conflict("this controller does not lead any more".into()));
        }
        let patch = json!({
            "apiVersion": WeightSync::api_version(&()),
            "kind": WeightSync::kind(&()),
            "metadata": {"name": self.name, "uid": id.weightsync, "resourceVersion": object.metadata.resource_version},
            "status": {"epoch": id.epoch, "term": id.term},
        });
        let params = PatchParams::apply(MANAGER).force();
        let what = format!("write epoch {} of WeightSync {}", id.epoch, self.name);
        match self.calls.run(what, self.api.patch_status(&self.name, &params, &Patch::Apply(patch))).await {
            Ok(_) => {
                self.seen.fetch_max(id.epoch, SeqCst);
                Ok(true)
            }
            Err(error) if error.is_conflict() => Ok(false),
            Err(error) => Err(other(error)),
        }
    }
}

#[async_trait]
impl EpochStore for KubeEpochStore {
    async fn persist(&self, id: &EpochId) -> Result<(), PersistError> {
        for tried in 0..TRIES {
            if self.try_once(id).await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10 << tried)).await;
        }
        Err(other("other clients changed the object at each try"))
    }
}
