//! How a publish looks: a bar while it runs, one line and the replicas that lack it when it ended.

use std::fmt::Write;
use std::time::Duration;

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use weightsync_core::protocol::{ClientReply, PublishError, PublishResult, UpdatePhase};

/// A bar of the bytes that the slowest replica has; not drawn when standard error is no terminal.
pub(super) struct Progress(ProgressBar);

impl Progress {
    pub(super) fn visible() -> Self {
        let bar = ProgressBar::no_length().with_message("waiting for the agent");
        let look = "{spinner} {msg:24} {bar:40} {binary_bytes:>12} of {binary_total_bytes:<12} {binary_bytes_per_sec}";
        if let Ok(style) = ProgressStyle::with_template(look) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    pub(super) fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    pub(super) fn heard(&self, reply: &ClientReply) {
        match reply {
            ClientReply::Accepted { .. } => self.0.set_message("waiting for its turn"),
            ClientReply::Ring { layout, .. } => self.0.set_length(layout.total_bytes),
            ClientReply::Again { attempt, reason } => {
                self.0.set_position(0);
                self.0.suspend(|| eprintln!("attempt {attempt}: {reason}"));
            }
            ClientReply::Progress { phase, bytes, total_bytes, .. } => {
                self.0.set_length(*total_bytes);
                self.0.set_position(*bytes);
                self.0.set_message(doing(*phase));
            }
            _ => {}
        }
    }

    pub(super) fn clear(&self) {
        self.0.finish_and_clear();
    }
}

fn doing(phase: UpdatePhase) -> &'static str {
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

/// What became of a version, and which replicas lack it.
pub(super) fn result(result: &PublishResult) -> String {
    let PublishResult { version, epoch, attempts, bytes, manifest, installed, behind, phases_ms } = result;
    let replicas = if installed.len() == 1 { "replica serves" } else { "replicas serve" };
    let mut text = format!("version {version}: {} {replicas} it (epoch {epoch}, {}", installed.len(), HumanBytes(*bytes));
    if *attempts > 1 {
        let _ = write!(text, ", attempt {attempts}");
    }
    let _ = writeln!(text, ", manifest {})", manifest.get(..12).unwrap_or(manifest));
    for (phase, ms) in phases_ms {
        let _ = writeln!(text, "  {phase:12} {ms:>8} ms");
    }
    for (member, reason) in behind {
        let _ = writeln!(text, "  behind: {member}: {reason}");
    }
    text
}

/// What failed, where, and whether trying again helps.
pub(super) fn error(error: &PublishError) -> String {
    let PublishError { code, message, retryable, phase, member } = error;
    let mut text = format!("{code:?}: {message}");
    if let Some(phase) = phase {
        let _ = write!(text, " [phase {phase:?}]");
    }
    if let Some(member) = member {
        let _ = write!(text, " [member {member}]");
    }
    if *retryable {
        text.push_str(" (the same command may succeed later)");
    }
    text
}

#[cfg(test)]
mod tests;
