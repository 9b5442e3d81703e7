//! What goes wrong on purpose, settable while the simulator runs.
//!
//! Decides which call meets which fault. A rule is a path, how many calls it lets pass, and how many it then spoils.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Everything that is to go wrong. Replaced as a whole by `POST /simulator/faults`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Faults {
    /// Faults of calls; the first that matches a call happens.
    pub rules: Vec<FaultRule>,
    /// A lie about loading.
    pub load: Option<LoadFault>,
    /// Rank on which `load` happens. SGLang reports errors of rank 0 only.
    pub load_rank: u32,
    /// Delay of SGLang's device after its answers, in ms, when a tensor is read from our memory; 20 at least.
    pub late_ms: u64,
    /// The engine has a `/dev/shm` of its own: torch's counters do not show that it has read a tensor.
    pub blind_to_counters: bool,
    /// Time by which FastDeploy's worker is late, in ms, with the answer to the message that ends an update: the reply to the server's call comes first.
    pub last_answer_ms: u64,
    /// World size to report instead of the true one.
    pub world_size: Option<u32>,
    /// Time that a load takes on top, in ms.
    pub load_ms: u64,
    /// Time that one token takes, in ms.
    pub token_ms: u64,
    /// A vLLM on a processor with AMX that computes in bfloat16: a first prompt of fewer than five tokens kills its worker, a longer one ends
    /// this fault (seen with vLLM 0.32).
    pub cold_amx: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FaultRule {
    /// Path of the call without its query, or `*` for every path of the engine.
    pub path: String,
    /// Calls that still pass before the first one is spoiled.
    #[serde(default)]
    pub after: u32,
    /// Calls that are spoiled; all that follow when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u32>,
    pub fault: Fault,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", deny_unknown_fields)]
pub enum Fault {
    /// Answered without being carried out.
    Answer {
        status: u16,
        body: Value,
    },
    /// Never answered, not carried out.
    Hang,
    /// Carried out, never answered.
    LoseReply,
    /// The connection breaks in the answer; not carried out.
    Disconnect,
    /// Carried out after a wait.
    Slow {
        /// The wait in ms.
        ms: u64,
    },
    Crash,
}

impl Fault {
    /// 503, as of a server that lives and cannot work.
    pub fn unavailable() -> Self {
        Self::Answer { status: 503, body: json!({"detail": "Service Unavailable"}) }
    }

    /// 200 with `success: false`.
    pub fn not_success() -> Self {
        Self::Answer { status: 200, body: json!({"success": false, "status": "error", "message": "it did not work"}) }
    }

    /// 200 with an error inside.
    pub fn error_inside() -> Self {
        let error = json!({"message": "it did not work", "code": 500});
        Self::Answer { status: 200, body: json!({"success": true, "status": "ok", "results": [null], "error": error}) }
    }
}

/// A false report about loading, with the response of a successful load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LoadFault {
    /// Nothing is read.
    AcknowledgeUnread,
    /// Everything is read, and the first tensor keeps its old bytes.
    SkipTensor,
    /// Everything is read, and one bit of the first tensor is wrong.
    Corrupt,
    /// Fails, each time, after half of the tensors were replaced; this one is not a lie.
    FailHalfway,
    /// As `FailHalfway`, once.
    FailHalfwayOnce,
    /// Everything is read, and the engine's last step fails after its success.
    SwallowFinish,
}

impl Faults {
    /// The fault of this call, if any; counts it.
    pub(super) fn of(&mut self, path: &str) -> Option<Fault> {
        for rule in self.rules.iter_mut().filter(|rule| rule.path == "*" || rule.path == path) {
            if rule.after > 0 {
                rule.after -= 1;
                continue;
            }
            match &mut rule.times {
                None => return Some(rule.fault.clone()),
                Some(0) => {}
                Some(times) => {
                    *times -= 1;
                    return Some(rule.fault.clone());
                }
            }
        }
        None
    }
}
