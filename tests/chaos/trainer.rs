//! The trainer: a separate process with the Python client, that must survive every fault. Reports its output; decides nothing.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::net::Link;

/// Longer than a publish may take by its own limit, which the client promises to keep.
const OUTCOME: Duration = Duration::from_secs(40);

/// How a publish ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// Replicas that serve it, those that do not with the reason, and attempts.
    Published { installed: Vec<String>, behind: Vec<(String, String)>, attempts: u64 },
    /// The exception, and what it says.
    Failed { kind: String, message: String },
}

pub struct Trainer {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    pid: Pid,
}

impl Trainer {
    /// Starts it in the pod of the source.
    pub async fn start(link: &Link, socket: &str, log: &Path) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", link.path().display())).arg("python3.11").arg(root.join("tests/chaos/trainer.py"));
        command.env("PYTHONPATH", root.join("python")).env("WEIGHTSYNC_SOCKET", socket).env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(std::fs::File::create(log).unwrap()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut trainer = Self { child, input, lines: BufReader::new(output).lines(), pid };
        trainer.hear("started", 0).await.unwrap();
        trainer
    }

    /// Begins a publish.
    pub async fn publish(&mut self, version: u64, checkpoint: &Path, gate: Option<usize>) {
        self.say(&json!({"op": "publish", "version": version, "path": checkpoint, "gate": gate})).await;
    }

    /// Waits until it stands before its gate; the outcome if that came first.
    pub async fn at_gate(&mut self, version: u64) -> Result<Option<Outcome>, String> {
        let event = self.hear("gate", version).await?;
        Ok((event["event"] != "gate").then(|| outcome(&event)))
    }

    /// Opens the gate.
    pub async fn go(&mut self) {
        self.say(&json!({"op": "go"})).await;
    }

    /// Waits for the outcome.
    pub async fn outcome(&mut self, version: u64) -> Result<Outcome, String> {
        self.hear("published", version).await.map(|event| outcome(&event))
    }

    /// The very process that was started is there.
    pub fn untouched(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(None) if self.child.id() == Some(self.pid.as_raw_nonzero().get().unsigned_abs()) => Ok(()),
            ended => Err(format!("the trainer's process is gone: {ended:?}")),
        }
    }

    async fn say(&mut self, order: &Value) {
        // A trainer that is gone is found by what it does not say.
        let _ = self.input.write_all(format!("{order}\n").as_bytes()).await;
    }

    /// The next event of that name or an outcome, of that version.
    async fn hear(&mut self, name: &str, version: u64) -> Result<Value, String> {
        let heard = async {
            while let Ok(Some(line)) = self.lines.next_line().await {
                let event: Value = serde_json::from_str(&line).map_err(|error| format!("{line}: {error}"))?;
                let ours = event["event"] == "started" || event["version"] == version;
                if ours && (event["event"] == name || event["event"] == "failed" || event["event"] == "published") {
                    return Ok(event);
                }
            }
            Err("the trainer's process ended".to_owned())
        };
        timeout(OUTCOME, heard)
            .await
            .unwrap_or_else(|_| Err(format!("the trainer did not say {name:?} of version {version} within {OUTCOME:?}")))
    }
}

fn outcome(event: &Value) -> Outcome {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if event["event"] == "failed" {
        return Outcome::Failed { kind: text(&event["kind"]), message: format!("{} {}", text(&event["message"]), text(&event["member"])) };
    }
    let result = &event["result"];
    let behind = result["behind"].as_object().into_iter().flatten();
    Outcome::Published {
        installed: result["installed"].as_array().into_iter().flatten().map(text).collect(),
        behind: behind.map(|(member, why)| (member.clone(), text(why))).collect(),
        attempts: result["attempts"].as_u64().unwrap_or_default(),
    }
}
