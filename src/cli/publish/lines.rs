//! Progress as lines, for a log or a pipe: one when the attempt or the phase changes, and one every ten seconds while neither does.
//!
//! Decides which replies of the agent make a line, and its text. It never prints.

use std::time::{Duration, Instant};

use indicatif::HumanBytes;

use weightsync_core::protocol::{ClientReply, UpdatePhase, Version};

/// Time between two lines while attempt and phase stay the same.
const PERIOD: Duration = Duration::from_secs(10);

/// The content of the last lines.
pub(super) struct Lines {
    version: Version,
    begun: Instant,
    printed: Instant,
    stage: Stage,
    bytes: Option<(u64, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Until the agent takes the publish.
    Agent,
    /// Until there is an attempt.
    Turn,
    Attempt(u32, UpdatePhase),
}

impl Lines {
    pub(super) fn new(version: Version, now: Instant) -> Self {
        Self { version, begun: now, printed: now, stage: Stage::Agent, bytes: None }
    }

    /// The line that this reply makes, if it makes one.
    pub(super) fn heard(&mut self, reply: &ClientReply, now: Instant) -> Option<String> {
        let stage = match reply {
            ClientReply::Accepted { .. } if self.stage == Stage::Agent => Stage::Turn,
            ClientReply::Progress { attempt, phase, bytes, total_bytes, .. } => {
                self.bytes = (*phase == UpdatePhase::Transfer).then_some((*bytes, *total_bytes));
                Stage::Attempt(*attempt, *phase)
            }
            ClientReply::Again { attempt, reason } => {
                self.printed = now;
                return Some(format!("version {}: attempt {attempt} sends all bytes again: {reason}", self.version));
            }
            _ => self.stage,
        };
        let changed = stage != self.stage;
        if !changed && now.duration_since(self.printed) < PERIOD {
            return None;
        }
        (self.stage, self.printed) = (stage, now);
        Some(self.line(now))
    }

    fn line(&self, now: Instant) -> String {
        let (version, seconds) = (self.version, now.duration_since(self.begun).as_secs());
        match self.stage {
            Stage::Agent => format!("version {version}: waiting for the agent ({seconds} s)"),
            Stage::Turn => format!("version {version}: waiting for its turn and for a group ({seconds} s)"),
            Stage::Attempt(attempt, phase) => {
                let of = |(bytes, total)| format!(", {} of {}", HumanBytes(bytes), HumanBytes(total));
                let bytes = self.bytes.map_or_else(String::new, of);
                format!("version {version}: attempt {attempt}: {}{bytes} ({seconds} s)", doing(phase))
            }
        }
    }
}

/// What happens in a phase.
pub(super) fn doing(phase: UpdatePhase) -> &'static str {
    match phase {
        UpdatePhase::Begin => "asking replicas",
        UpdatePhase::Transfer => "sending",
        UpdatePhase::Verify => "checking digests",
        UpdatePhase::Staged => "staged",
        UpdatePhase::Activate => "engines switch",
        UpdatePhase::Done => "done",
        UpdatePhase::Failed => "failed",
    }
}

#[cfg(test)]
mod tests;
