//! The file of `weightsync local -f FILE`: who trains, who serves, and the rules of updates.
//!
//! Decides defaults and refuses invalid values, with the field's name. It is the counterpart of the resource for one host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::api::{Auto, Canary, Gdr, NCCL_ENV, Nccl};
use weightsync_coordinator::local::UpdateFile;
use weightsync_core::protocol::{Delivery, PausePolicy, Preflight, TransportPolicy, TransportWish, UpdatePolicy};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LocalFile {
    /// Name of the group; part of the trainer's socket name and of log file names.
    pub name: String,
    /// Folder for logs and the epoch; made if it is missing.
    pub directory: PathBuf,
    /// Folder in memory where versions are put for engines; `/dev/shm/weightsync-NAME` if it is missing.
    #[serde(default)]
    pub versions: Option<PathBuf>,
    pub trainer: TrainerFile,
    /// Rollouts, in the order of their ranks.
    pub rollouts: Vec<RolloutFile>,
    #[serde(default)]
    pub update: UpdateFile,
    #[serde(default)]
    pub transport: TransportFile,
    /// Who joins the group.
    #[serde(default)]
    pub delivery: Delivery,
    /// The kept version that the group goes back to and is held at (`update.keep`).
    #[serde(default)]
    pub target_version: Option<u64>,
    /// The prompt that every engine must answer after a switch, before its replica reports the version.
    #[serde(default)]
    pub canary: Option<Canary>,
}

/// How bytes travel: at most one of the fields; `auto` without any.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TransportFile {
    /// NCCL when every member has a GPU of its own, else TCP.
    #[serde(default)]
    pub auto: Option<Auto>,
    /// TCP; its settings are `update.tls` and `update.bucketMiB`.
    #[serde(default)]
    pub tcp: Option<Auto>,
    /// NCCL; a member without a GPU of its own is left out.
    #[serde(default)]
    pub nccl: Option<Nccl>,
    /// Reads through NIXL; a member without it is left out.
    #[serde(default)]
    pub gdr: Option<Gdr>,
    /// Whether the edges of a chain are measured, between updates. `Off` if left out: one host has no network between its members.
    #[serde(default = "off")]
    pub preflight: Preflight,
}

fn off() -> Preflight {
    Preflight::Off
}

impl Default for TransportFile {
    fn default() -> Self {
        Self { auto: None, tcp: None, nccl: None, gdr: None, preflight: off() }
    }
}

impl TransportFile {
    fn policy(&self) -> TransportPolicy {
        TransportPolicy { preflight: self.preflight, ..self.chosen() }
    }

    fn chosen(&self) -> TransportPolicy {
        if let Some(gdr) = &self.gdr {
            return gdr.policy();
        }
        let wish = match (&self.nccl, &self.tcp) {
            (Some(_), _) => TransportWish::Nccl,
            (None, Some(_)) => TransportWish::Tcp,
            (None, None) => TransportWish::Auto,
        };
        let nccl = self.nccl.clone().unwrap_or_default();
        let number = |number: Option<i32>| number.and_then(|number| u32::try_from(number).ok()).unwrap_or(0);
        TransportPolicy {
            wish,
            slot_bytes: u64::from(number(nccl.bucket_mib)) << 20,
            slots: number(nccl.buffers),
            allow_tcp: nccl.allow_tcp.unwrap_or(false),
            environment: nccl.env,
            ..TransportPolicy::default()
        }
    }

    fn check(&self) -> Result<(), String> {
        if [self.auto.is_some(), self.tcp.is_some(), self.nccl.is_some(), self.gdr.is_some()].into_iter().filter(|given| *given).count() > 1
        {
            return Err("transport: exactly one transport must be given: auto, tcp, nccl or gdr".into());
        }
        let within = |number: Option<i32>, range: std::ops::RangeInclusive<i32>| number.is_none_or(|number| range.contains(&number));
        if self.gdr.is_some_and(|gdr| !within(gdr.bucket_mib, 1..=1024) || !within(gdr.buffers, 2..=64)) {
            return Err("transport.gdr: bucketMiB must be 1 to 1024, buffers 2 to 64".into());
        }
        let Some(nccl) = &self.nccl else { return Ok(()) };
        if let Some(name) = nccl.env.keys().find(|name| !NCCL_ENV.contains(&name.as_str())) {
            return Err(format!("transport.nccl.env: {name} is not one of {}", NCCL_ENV.join(", ")));
        }
        if !within(nccl.bucket_mib, 1..=16_384) || !within(nccl.buffers, 2..=64) {
            return Err("transport.nccl: bucketMiB must be 1 to 16384, buffers 2 to 64".into());
        }
        Ok(())
    }
}

/// The trainer: its agent is started; the trainer itself is yours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TrainerFile {
    /// Name; `weightsync local` prints what the trainer needs to find its agent.
    pub name: String,
    /// UUID of the GPU that its agent uses (`nvidia-smi -L`); over TCP only without one.
    #[serde(default)]
    pub gpu: Option<String>,
}

/// A rollout: an engine and its agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RolloutFile {
    pub name: String,
    pub engine: EngineFile,
    /// Ranks of the engine (tensor x pipeline x data parallelism); compared with the engine's own report.
    #[serde(default = "one")]
    pub size: u32,
    /// UUIDs of the GPUs that its agent uses: those of the engine, in the order of its ranks. Over TCP only without them.
    #[serde(default)]
    pub gpus: Vec<String>,
}

/// An engine server on this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineFile {
    /// `vllm`, `sglang`, `lmdeploy` or `fastdeploy`.
    pub kind: String,
    /// Its port on 127.0.0.1.
    pub port: u16,
    /// Starts it, and starts it again when it ends; without a command it is expected to run.
    #[serde(default)]
    pub command: Vec<String>,
    /// Environment of that command, besides our own.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

fn one() -> u32 {
    1
}

impl LocalFile {
    /// Reads the text of a file and checks it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: Self = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        file.check()?;
        Ok(file)
    }

    pub fn policy(&self) -> UpdatePolicy {
        let transport = match self.delivery {
            Delivery::Engine => self.transport.policy().with_engines(self.rollouts.iter().map(|rollout| rollout.engine.kind.as_str())),
            Delivery::Agent | Delivery::External => self.transport.policy(),
        };
        let canary = self.canary.as_ref().map(Canary::policy);
        UpdatePolicy { delivery: self.delivery, transport, canary, ..self.update.policy() }
    }

    fn check(&self) -> Result<(), String> {
        self.transport.check()?;
        if self.delivery == Delivery::Engine && self.transport.tcp.is_some() {
            return Err("delivery: Engine moves weights by NCCL only: remove transport.tcp, or set delivery to Agent".into());
        }
        if self.delivery != Delivery::Agent && self.transport.gdr.is_some() {
            return Err("delivery: transport gdr is between agents: remove transport.gdr, or set delivery to Agent".into());
        }
        if self.delivery != Delivery::Agent && self.update.max_unavailable > 0 {
            return Err("delivery: only with Agent does a version lie complete before engines switch: remove update.maxUnavailable".into());
        }
        if let Some(canary) = &self.canary {
            if let Some((field, message)) = canary.problems().into_iter().next() {
                return Err(format!("{field}: {message}"));
            }
            if self.delivery == Delivery::External || self.update.pause == PausePolicy::External {
                return Err("canary: an engine that the trainer feeds or pauses by itself is not asked by a canary".into());
            }
            if self.update.keep < 2 {
                return Err("canary: it needs an earlier version to go back to: set update.keep to 2 or more".into());
            }
        }
        let plain = |field: &str, name: &str| {
            let good =
                !name.is_empty() && name.len() <= 63 && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
            if good { Ok(()) } else { Err(format!("{field}: \"{name}\" must be 1 to 63 of a-z, 0-9 and -")) }
        };
        plain("name", &self.name)?;
        plain("trainer.name", &self.trainer.name)?;
        if self.rollouts.is_empty() {
            return Err("rollouts: name at least one".into());
        }
        let (mut names, mut ports) = (BTreeSet::from([self.trainer.name.as_str()]), BTreeSet::new());
        for rollout in &self.rollouts {
            plain("rollouts.name", &rollout.name)?;
            if !names.insert(&rollout.name) {
                return Err(format!("rollouts: the name {} is used twice", rollout.name));
            }
            if rollout.engine.port == 0 || !ports.insert(rollout.engine.port) {
                return Err(format!("rollouts {}: port {} is 0 or used twice", rollout.name, rollout.engine.port));
            }
            if rollout.size == 0 {
                return Err(format!("rollouts {}: size must be at least 1", rollout.name));
            }
        }
        let most = u32::try_from(self.rollouts.len()).unwrap_or(u32::MAX);
        if self.update.min_ready == 0 || self.update.min_ready > most {
            return Err(format!("update.minReady: {} must be 1 to {most}, the number of rollouts", self.update.min_ready));
        }
        if self.update.timeout_seconds == 0 || self.update.silence_seconds == 0 || self.update.health_period_milliseconds == 0 {
            return Err("update: timeoutSeconds, silenceSeconds and healthPeriodMilliseconds must be at least 1".into());
        }
        if !(1..=16).contains(&self.update.keep) {
            return Err(format!("update.keep: {} must be 1 to 16", self.update.keep));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
