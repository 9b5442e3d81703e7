//! The core of a joiner: its rank, and the group that the rank is in.

use base64::Engine as _;
use serde_json::{Value, json};
use weightsync_core::protocol::worker::{NcclId, Opaque, Proof};
use weightsync_gpu::worker::Broadcast;
use weightsync_torch::store::{Client, nccl_id_keys};

use super::{FOR_EVER, Reply, failed};
use crate::gpu::fixture::Member;
use crate::world::SOON;

/// A group that it is in.
pub(super) struct Group {
    pub(super) name: String,
    /// The store's connection, and whether the communicator was made.
    store: Option<Client>,
    rank: (u32, u32),
    stands: bool,
}

/// One thing at a time.
pub(super) struct Core {
    pub(super) member: Member,
    pub(super) group: Option<Group>,
    pub(super) next: u64,
}

impl Core {
    pub(super) async fn leave(&mut self, group: Group) {
        if group.stands {
            let _gone = self.member.worker.abort(self.next, SOON).await;
        }
    }

    pub(super) async fn join_store(&mut self, body: &Value) -> Reply {
        let address = format!("{}:{}", body["master_address"].as_str().unwrap(), body["master_port"]).parse().unwrap();
        let number = |name: &str| u32::try_from(body[name].as_u64().unwrap()).unwrap();
        let name = body["group_name"].as_str().unwrap().to_owned();
        let mut store = Client::connect(address, FOR_EVER).await.unwrap();
        store.hello().await.unwrap();
        self.next += 1;
        self.group = Some(Group { name, store: Some(store), rank: (number("rank_offset"), number("world_size")), stands: false });
        (200, json!({"success": true, "message": "joined"}))
    }

    pub(super) async fn join_id(&mut self, info: &Value) -> Reply {
        let id = base64::engine::general_purpose::STANDARD.decode(info["nccl_unique_id_b64"].as_str().unwrap_or("*"));
        let Some(id) = id.ok().and_then(|id| <[u8; 128]>::try_from(id).ok()) else { return failed("it is not valid standard base64") };
        let number = |name: &str| u32::try_from(info[name].as_u64().unwrap()).unwrap();
        let rank = (number("rank_offset"), number("world_size"));
        self.next += 1;
        if self.member.worker.join_as(self.next, Opaque(id), rank, Proof::AllReduce, FOR_EVER).await.is_err() {
            return failed("NCCL error");
        }
        self.group = Some(Group { name: String::new(), store: None, rank, stands: true });
        (200, json!({"message": "Weight transfer initialized"}))
    }

    /// Enters one broadcast; makes the communicator first where a store was joined, as torch does.
    pub(super) async fn receive(&mut self, bytes: u64) -> Option<Vec<u8>> {
        let group = self.group.as_mut()?;
        if !group.stands {
            let [key, _] = nccl_id_keys(&group.name);
            let id = group.store.as_mut()?.get(&key, FOR_EVER).await.ok()?;
            let id: NcclId = Opaque(id.try_into().ok()?);
            self.member.worker.join_as(self.next, id, group.rank, Proof::Nothing, FOR_EVER).await.ok()?;
            group.stands = true;
        }
        let slot = self.member.ring.take(SOON).await.ok()?;
        let broadcast = Broadcast { group: self.next, root: 0, at: slot.at(0), bytes, parts: Vec::new(), after: None };
        self.member.worker.broadcast(broadcast, FOR_EVER).await.ok()?;
        Some(self.member.read(&slot, usize::try_from(bytes).unwrap()).await)
    }
}
