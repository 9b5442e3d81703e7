//! How a publish looks: a bar while it runs, or lines where standard error is no terminal; one line and the replicas that lack it when it
//! ended.

use std::cell::RefCell;
use std::fmt::Write;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use super::lines::{Lines, doing};
use weightsync_core::protocol::{ClientReply, MixedWindow, PublishError, PublishResult, Version};

/// What is shown while a publish runs, on standard error.
pub(super) enum Progress {
    /// A bar of the bytes that the slowest replica has.
    Bar(ProgressBar),
    Lines(RefCell<Lines>),
    Hidden,
}

impl Progress {
    /// A bar on a terminal, lines elsewhere.
    pub(super) fn visible(version: Version) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::Lines(RefCell::new(Lines::new(version, Instant::now())));
        }
        let bar = ProgressBar::no_length().with_message("waiting for the agent");
        let look = "{spinner} {msg:24} {bar:40} {binary_bytes:>12} of {binary_total_bytes:<12} {binary_bytes_per_sec}";
        if let Ok(style) = ProgressStyle::with_template(look) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self::Bar(bar)
    }

    pub(super) fn hidden() -> Self {
        Self::Hidden
    }

    pub(super) fn heard(&self, reply: &ClientReply) {
        match self {
            Self::Bar(bar) => move_bar(bar, reply),
            Self::Lines(lines) => {
                if let Some(line) = lines.borrow_mut().heard(reply, Instant::now()) {
                    // A reader that went away must not end the publish.
                    let _ = writeln!(std::io::stderr(), "{line}");
                }
            }
            Self::Hidden => {}
        }
    }

    pub(super) fn clear(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

fn move_bar(bar: &ProgressBar, reply: &ClientReply) {
    match reply {
        ClientReply::Accepted { .. } => bar.set_message("waiting for its turn"),
        ClientReply::Ring { layout, .. } => bar.set_length(layout.total_bytes),
        ClientReply::Again { attempt, reason } => {
            bar.set_position(0);
            bar.suspend(|| eprintln!("attempt {attempt}: {reason}"));
        }
        ClientReply::Progress { phase, bytes, total_bytes, .. } => {
            bar.set_length(*total_bytes);
            bar.set_position(*bytes);
            bar.set_message(doing(*phase));
        }
        _ => {}
    }
}

/// What became of a version, and which replicas lack it.
pub(super) fn result(result: &PublishResult) -> String {
    let PublishResult { version, epoch, attempts, bytes, manifest, installed, behind, phases_ms, mixed, notes } = result;
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
    for (member, windows) in mixed {
        for MixedWindow { begin_ms, end_ms, .. } in windows {
            let end = end_ms.map_or_else(|| "now on".to_owned(), |end| end.to_string());
            let _ = writeln!(text, "  served while it loaded: {member}: from {begin_ms} to {end} (ms since 1970)");
        }
    }
    for (member, notes) in notes {
        for note in notes {
            let _ = writeln!(text, "  note: {member}: {note}");
        }
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
