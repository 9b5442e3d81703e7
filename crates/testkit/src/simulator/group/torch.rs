//! The weight groups of an engine on torch, by name: what SGLang and LMDeploy have in common.
//!
//! Decides which ranks of the group the engine's ranks are, and what one bucket is on the wire. What each engine says about it differs, and
//! is decided there.

use std::collections::HashMap;
use std::sync::Arc;

use futures::future::join_all;
use serde_json::Value;
use tokio::sync::Mutex;

use super::super::tensors::Taken;
use super::{Announced, Member, Ranks, Trouble, merged};

pub(in super::super) struct TorchGroups {
    pub(in super::super) ranks: Arc<Ranks>,
    groups: Mutex<HashMap<String, Vec<Member>>>,
}

pub(in super::super) struct Rendezvous {
    pub(in super::super) name: String,
    host: String,
    port: u16,
    offset: u32,
    world: u32,
    backend: String,
}

/// How tensors lie on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Layout {
    /// One broadcast a tensor.
    Tensors,
    /// One broadcast of all, back to back.
    Bucket,
}

impl Rendezvous {
    /// The fields of both engines; the first that is missing or of another type.
    pub(in super::super) fn read(body: &Value, default_name: Option<&str>) -> Result<Self, &'static str> {
        let number = |name: &'static str| body.get(name).and_then(Value::as_u64).ok_or(name);
        let text = |name: &'static str, default: Option<&str>| match body.get(name) {
            None => default.map(str::to_owned).ok_or(name),
            Some(value) => value.as_str().map(str::to_owned).ok_or(name),
        };
        Ok(Self {
            host: unbracketed(&text("master_address", None)?).ok_or("master_address")?,
            port: u16::try_from(number("master_port")?).map_err(|_| "master_port")?,
            offset: u32::try_from(number("rank_offset")?).map_err(|_| "rank_offset")?,
            world: u32::try_from(number("world_size")?).map_err(|_| "world_size")?,
            name: text("group_name", default_name)?,
            backend: text("backend", Some("nccl"))?,
        })
    }
}

/// The host of `tcp://ADDRESS:PORT` as torch reads it: an IPv6 address without brackets makes no URL.
fn unbracketed(host: &str) -> Option<String> {
    match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').map(str::to_owned),
        None => (!host.contains(':')).then(|| host.to_owned()),
    }
}

impl TorchGroups {
    pub(in super::super) fn new(ranks: Arc<Ranks>) -> Self {
        Self { ranks, groups: Mutex::default() }
    }

    pub(in super::super) async fn has(&self, name: &str) -> bool {
        self.groups.lock().await.contains_key(name)
    }

    pub(in super::super) async fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.groups.lock().await.keys().cloned().collect();
        names.sort();
        names
    }

    /// Every rank meets the others at the store. What each rank says, in their order, when it is not well.
    pub(in super::super) async fn init(&self, at: &Rendezvous) -> Result<(), Vec<Result<(), Trouble>>> {
        let meet = (0..self.ranks.count()).map(async |local| {
            let rank = at.offset.saturating_add(u32::try_from(local).unwrap_or(u32::MAX));
            let member = Member::meet(&self.ranks, local, (&at.host, at.port), (rank, at.world), &at.name, &at.backend).await?;
            // torch's own registry, which is asked after the store.
            if self.has(&at.name).await {
                let message = "The specified group name has already been created, please use a different group name";
                return Err(Trouble::Raised(message.to_owned()));
            }
            Ok(member)
        });
        let met: Vec<Result<Member, Trouble>> = join_all(meet).await;
        if met.iter().any(Result::is_err) {
            return Err(met.into_iter().map(|met| met.map(drop)).collect());
        }
        self.groups.lock().await.insert(at.name.clone(), met.into_iter().flatten().collect());
        Ok(())
    }

    /// Every rank takes part in the broadcasts of these tensors. The group is out of the table meanwhile, as a name that somebody uses.
    pub(in super::super) async fn receive(&self, name: &str, tensors: &[Announced], layout: Layout) -> Result<Vec<Taken>, Trouble> {
        let gone = || Trouble::Raised(format!("group {name} is in use"));
        let mut members = self.groups.lock().await.insert(name.to_owned(), Vec::new()).ok_or_else(gone)?;
        let within = self.ranks.options()?.patience;
        let ranks = join_all(members.iter_mut().map(async |member| match layout {
            Layout::Bucket => {
                let received = member.broadcast(tensors.iter().map(|tensor| tensor.bytes).sum(), within).await?;
                let starts = tensors.iter().scan(0, |at, tensor| {
                    let start = *at;
                    *at += tensor.bytes;
                    Some(start)
                });
                let taken = tensors.iter().zip(starts).map(|(tensor, start)| received.tensor(tensor, start));
                taken.collect::<Result<Vec<_>, String>>().map_err(Trouble::Raised)
            }
            Layout::Tensors => {
                let mut taken = Vec::new();
                for tensor in tensors {
                    if !member.is_group() {
                        return Err(Trouble::Raised("'NoneType' object has no attribute 'wait'".to_owned()));
                    }
                    let received = member.broadcast(tensor.bytes, within).await?;
                    taken.push(received.tensor(tensor, 0).map_err(Trouble::Raised)?);
                }
                Ok(taken)
            }
        }));
        let ranks = ranks.await.into_iter().collect::<Result<Vec<_>, Trouble>>();
        self.groups.lock().await.insert(name.to_owned(), members);
        ranks.map(merged)
    }

    /// Every rank leaves the group; none when there is no such group.
    pub(in super::super) async fn destroy(&self, name: &str) -> Option<Result<(), Trouble>> {
        let members = self.groups.lock().await.remove(name)?;
        let left = join_all(members.into_iter().map(Member::destroy)).await;
        Some(left.into_iter().collect())
    }
}
