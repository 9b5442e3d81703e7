//! The progress of an update, as its leader reports it: in the event stream, in status, and on the web page. Values only.

use serde::{Deserialize, Serialize};

use super::{EpochId, MemberName, Version};

/// Most bytes of all members' reasons together in a view.
const REASONS: usize = 64 << 10;
/// Most bytes of the cause of a failed update in a view.
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
    /// Members that took part, with their results.
    pub members: Vec<MemberProgress>,
    /// Wall time of each finished phase in ms: `begin`, `transfer`, `verify`, `activate`.
    pub phases_ms: Vec<(String, u64)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Whether this fed joiners instead of publishing.
    pub feeding: bool,
}

impl UpdateView {
    /// Shortens texts so that the view fits a line of an event stream ([`super::LONGEST_EVENT`]).
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

    /// The kind of update in metrics and traces.
    pub fn kind(&self) -> &'static str {
        if self.feeding { "feed" } else { "publish" }
    }
}

/// Steps of an update, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum UpdatePhase {
    /// Members receive the request to open it.
    Begin,
    /// Buckets travel.
    Transfer,
    /// Digests and coverage are checked.
    Verify,
    /// Verified everywhere; waits for the trainer (`activation: manual`).
    Staged,
    /// Engines switch.
    Activate,
    /// At least `minReady` replicas serve it.
    Done,
    /// Ended without effect on the version.
    Failed,
}

impl UpdatePhase {
    /// Whether it is the last phase.
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

/// The transfer of a version's bytes to a member, as that member measured it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Received {
    /// The version.
    pub version: Version,
    /// The member that sent them: the previous one in the chain, the one whose memory was read, or, over NCCL, the leader.
    pub from: MemberName,
    /// How they travelled. Joiners get theirs over TCP, whatever the group uses.
    pub by: TransportKind,
    /// Number of bytes.
    pub bytes: u64,
    /// From the first byte to the last, in µs, including waits for the sender.
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
    /// By broadcasts between GPUs, or from the leader's GPU memory.
    Nccl,
    /// By reads from the previous member's memory.
    Gdr,
}

impl TransportKind {
    /// Its name in status and metrics.
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
    /// Refused before a byte moved.
    Refused,
    /// Receives buckets.
    Receiving,
    /// Every byte arrived once and every digest agrees.
    Delivered,
    /// The engine is being switched.
    Installing,
    /// The engine confirmed its last step.
    Installed,
    /// Failed; `dirty` in the member's state shows whether the engine was changed.
    Failed,
}

impl InstallStep {
    /// Whether it is the last step.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Refused | Self::Installed | Self::Failed)
    }
}
