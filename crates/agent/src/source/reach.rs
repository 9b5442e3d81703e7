//! Which members a failed publish reached: a leader that is cut off while engines switch does not know what they did.
//!
//! Pure. Decides whether a failure may be reported as one (nothing that counts moved), or the outcome is not known. A report that a member
//! installed, or did not, is trusted; silence is neither.

use std::collections::BTreeSet;

use crate::lead::table::Switching;
use weightsync_core::protocol::{MemberName, PublishError, PublishErrorCode, Version};

/// What all attempts of one publish know.
#[derive(Debug, Default)]
pub struct Reach {
    installed: BTreeSet<MemberName>,
    unheard: BTreeSet<MemberName>,
    min_ready: u32,
}

impl Reach {
    /// So many replicas make a version count; of several epochs the fewest.
    pub fn needed(&mut self, min_ready: u32) {
        let min_ready = min_ready.max(1);
        self.min_ready = if self.min_ready == 0 { min_ready } else { self.min_ready.min(min_ready) };
    }

    /// The latest word of an attempt.
    pub fn heard(&mut self, known: Switching) {
        let Switching { installed, failed, unheard } = known;
        for member in failed {
            self.installed.remove(&member);
            self.unheard.remove(&member);
        }
        for member in unheard {
            self.installed.remove(&member);
            self.unheard.insert(member);
        }
        for member in installed {
            self.unheard.remove(&member);
            self.installed.insert(member);
        }
    }

    /// What a trainer hears of a publish that failed so.
    pub fn judge(&self, version: Version, error: PublishError) -> PublishError {
        let names = |members: &BTreeSet<MemberName>| members.iter().map(|member| member.0.as_str()).collect::<Vec<_>>().join(", ");
        let mut what = Vec::new();
        if !self.installed.is_empty() {
            what.push(format!("{} serve version {version}", names(&self.installed)));
        }
        if !self.unheard.is_empty() {
            what.push(format!("{} were asked to switch to version {version}, and what came of it was not heard", names(&self.unheard)));
        }
        if what.is_empty() {
            return error;
        }
        let message = format!("{}: {}", what.join("; "), error.message);
        let may_count = self.installed.len() + self.unheard.len() >= usize::try_from(self.min_ready).unwrap_or(usize::MAX);
        // A version that most refuse is left by all, anyone who took it.
        if self.unheard.is_empty() || !may_count || error.code == PublishErrorCode::VersionRefused {
            return PublishError { message, ..error };
        }
        PublishError { code: PublishErrorCode::OutcomeUnknown, message, retryable: true, ..error }
    }
}
