//! The output of the demo: lines and a bar on a terminal while it runs, or one JSON object at its end.

use std::fmt::Display;
use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::DemoFault;
use weightsync_agent::command::Output;
use weightsync_core::protocol::{ClientReply, MemberName, PublishResult};

/// A closed terminal takes no line: the demo still ends normally, and leaves no processes or files.
fn print(line: &dyn Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// What the numbers mean, and where to go next.
const MEANING: &str = "
An epoch is one formation of the group. It ends when a member dies or joins, and the trainer is never restarted for it.
The times of a version: begin (every member is ready), transfer (bytes travel), verify (digests agree), activate (engines load it).
Next: weightsync local runs the same with your own servers on this host (docs/quick-start.md); docs/install.md is for a cluster.";

/// Whole milliseconds.
pub fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Where lines go: standard output, or nowhere with JSON output.
pub struct Screen {
    output: Output,
}

pub struct Bar(ProgressBar);

impl Screen {
    /// A screen for that kind of reader.
    pub fn new(output: Output) -> Self {
        Self { output }
    }

    pub fn say(&self, line: &str) {
        if self.output == Output::Human {
            print(&line);
        }
    }

    pub fn progress(&self, version: u64) -> Bar {
        let target = if self.output == Output::Human { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {bytes}/{total_bytes} {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(format!("version {version}"));
        Bar(bar)
    }

    /// A version that arrived.
    pub fn published(&self, result: &PublishResult, took: Duration) {
        let phases: Vec<_> = result.phases_ms.iter().map(|(phase, ms)| format!("{phase} {ms}")).collect();
        let attempts = if result.attempts == 1 { String::new() } else { format!(", {} attempts", result.attempts) };
        self.say(&format!(
            "version {}: on {} servers after {:.1} MB in {} ms, in epoch {} ({} ms{attempts})",
            result.version,
            result.installed.len(),
            megabytes(result.bytes),
            ms(took),
            result.epoch,
            phases.join(", ")
        ));
    }

    pub fn killed(&self, member: &MemberName, fault: DemoFault, percent: u64, detected: Duration, recovered: Duration) {
        self.say(&format!(
            "{member} was {} when it had {percent} % of the bytes: noticed after {} ms; a new epoch without it gave the version to the \
             others after {} ms",
            fault.done(),
            ms(detected),
            ms(recovered)
        ));
    }
}

#[allow(clippy::cast_precision_loss)]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

impl Bar {
    pub fn heard(&self, reply: &ClientReply) {
        match reply {
            ClientReply::Progress { bytes, total_bytes, phase, .. } => {
                self.0.set_length(*total_bytes);
                self.0.set_position(*bytes);
                self.0.set_message(format!("{phase:?}").to_lowercase());
            }
            ClientReply::Again { reason, .. } => self.0.println(format!("again: {reason}")),
            ClientReply::Done { .. } | ClientReply::Error { .. } => self.0.finish_and_clear(),
            _ => {}
        }
    }
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Published {
    version: u64,
    epoch: u64,
    attempts: u32,
    bytes: u64,
    milliseconds: u64,
    phases_ms: Vec<(String, u64)>,
    manifest: String,
    installed: Vec<MemberName>,
}

impl Published {
    /// What a publish answered, and how long it took.
    pub fn new(result: &PublishResult, took: Duration) -> Self {
        Self {
            version: result.version,
            epoch: result.epoch,
            attempts: result.attempts,
            bytes: result.bytes,
            milliseconds: ms(took),
            phases_ms: result.phases_ms.clone(),
            manifest: result.manifest.clone(),
            installed: result.installed.clone(),
        }
    }
}

/// The whole outcome; `--output json` prints it.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    pub replicas: u32,
    /// How bytes travelled: `tcp` or `nccl`.
    pub transport: String,
    pub seed: u64,
    pub epochs: u64,
    /// Versions in order.
    pub versions: Vec<Published>,
    /// Bytes of all versions.
    pub bytes: u64,
    pub killed: Option<MemberName>,
    /// Part of its bytes that it had, in percent.
    pub killed_at_percent: Option<u64>,
    /// From the kill until the group gave the epoch up, in ms.
    pub detected_ms: Option<u64>,
    /// From the kill until the others served the version, in ms.
    pub recovered_ms: Option<u64>,
    /// From the new start of the killed rollout until it served the version, in ms.
    pub rejoined_ms: Option<u64>,
    /// Whether every engine served what was published, each time.
    pub verified: bool,
    pub proof: &'static str,
    pub disagreements: Vec<String>,
}

impl Outcome {
    pub fn kill(&mut self, member: &MemberName, percent: u64, detected: Duration, recovered: Duration) {
        self.killed = Some(member.clone());
        self.killed_at_percent = Some(percent);
        (self.detected_ms, self.recovered_ms) = (Some(ms(detected)), Some(ms(recovered)));
    }

    /// Notes that something served is not what was published.
    pub fn disagree(&mut self, what: String) {
        self.disagreements.push(what);
        self.verified = false;
    }

    pub fn print(&self, output: Output) {
        match output {
            Output::Json => print(&serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))),
            Output::Human if self.verified => {
                print(&format_args!("\nverified: {}", self.proof));
                print(&MEANING);
            }
            Output::Human => {
                for disagreement in &self.disagreements {
                    print(&format_args!("NOT VERIFIED: {disagreement}"));
                }
            }
        }
    }
}
