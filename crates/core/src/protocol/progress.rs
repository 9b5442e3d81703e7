//! The progress of an update, as its leader reports it: in the event stream, in status, and on the web page. Values only.

use serde::{Deserialize, Serialize};

use super::{EpochId, MemberName, Version};

/// Bytes of all members' reasons together that a view may carry.
const REASONS: usize = 64 << 10;
/// Bytes of the cause of a failed update that a view may carry.
const FAILURE: usize = 4 << 10;

/// A source's (or feeder's) view of one update; the last one is kept and shown in status.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct UpdateView {
    pub id: EpochId,
    pub version: Version,
    /// Attempts for this version, from 1.
    pub attempt: u32,
    pub phase: UpdatePhase,
    pub total_bytes: u64,
    /// Members that took part, with what became of each.
    pub members: Vec<MemberProgress>,
    /// Wall time of each finished phase in ms: `begin`, `transfer`, `verify`, `activate`.
    pub phases_ms: Vec<(String, u64)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Whether this fed joiners rather than published.
    pub feeding: bool,
}

impl UpdateView {
    /// Shortens what people read so that the view fits a line of an event stream ([`super::LONGEST_EVENT`]).
    pub fn shorten(&mut self) {
        let each = REASONS / self.members.len().max(1);
        let reasons = self.members.iter_mut().filter_map(|member| member.reason.as_mut()).map(|reason| (reason, each));
        for (text, most) in reasons.chain(self.failure.as_mut().map(|failure| (failure, FAILURE))) {
            if text.len() > most {
                let cut = (0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
                text.truncate(cut);
                text.push('…');
            }
        }
    }

    /// What it is called in metrics and traces.
    pub fn kind(&self) -> &'static str {
        if self.feeding { "feed" } else { "publish" }
    }
}

/// Steps of an update, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum UpdatePhase {
    /// Members are asked to open it.
    Begin,
    /// Buckets travel.
    Transfer,
    /// Digests and coverage are checked.
    Verify,
    /// Verified everywhere; waits for the trainer's word (`activation: manual`).
    Staged,
    /// Engines switch.
    Activate,
    /// At least `minReady` replicas serve it.
    Done,
    /// Ended without effect on the version.
    Failed,
}

impl UpdatePhase {
    /// Whether nothing follows.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed)
    }
}

/// One member in an update.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct MemberProgress {
    pub member: MemberName,
    /// Bytes received and checked.
    pub bytes: u64,
    pub step: InstallStep,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// How the bytes of a version came to a member, as that member measured it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Received {
    /// The version.
    pub version: Version,
    /// The member that sent them: the one before in the chain, the one whose memory was read, or over NCCL the leader.
    pub from: MemberName,
    /// How they travelled. Joiners get theirs over TCP, whatever the group uses.
    pub by: TransportKind,
    /// How many.
    pub bytes: u64,
    /// From the first byte to the last, in microseconds. Waits for the sender count.
    pub microseconds: u64,
}

impl Received {
    /// Bytes a second.
    pub fn rate(&self) -> u64 {
        let rate = u128::from(self.bytes) * 1_000_000 / u128::from(self.microseconds.max(1));
        u64::try_from(rate).unwrap_or(u64::MAX)
    }
}

/// A way in which bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// Over connections.
    Tcp,
    /// By broadcasts between GPUs, or out of the leader's GPU memory.
    Nccl,
    /// By reads from the memory of the member before.
    Gdr,
}

impl TransportKind {
    /// As status and metrics name it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Nccl => "nccl",
            Self::Gdr => "gdr",
        }
    }
}

/// Steps of a rollout in an update, in order; `Failed` may follow any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum InstallStep {
    /// Said no before a byte moved.
    Refused,
    /// Receives buckets.
    Receiving,
    /// Every byte arrived once and every digest agrees.
    Delivered,
    /// The engine is being switched.
    Installing,
    /// The engine confirmed its last step.
    Installed,
    /// Failed; `dirty` in the member's state says whether the engine was touched.
    Failed,
}

impl InstallStep {
    /// Whether nothing follows.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Refused | Self::Installed | Self::Failed)
    }
}
