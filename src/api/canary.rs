//! The canary (`spec.canary`) as the user writes it: the prompt for engines after each switch.
//!
//! Log-probs are integers or decimal text, because Kubernetes' resources have no floats. They are converted to thousandths.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use weightsync_core::protocol::CanaryPolicy;

/// A fixed prompt, and the lowest log-prob that each generated token may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Canary {
    /// Text that the model completes, such as `The capital of France is`. Choose one that every good version completes in the same way.
    #[schemars(length(min = 1, max = 4096))]
    pub prompt: String,

    /// Number of tokens to generate, with greedy decoding. Default: 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub max_tokens: i32,

    /// Lowest allowed log-prob (natural logarithm) of each token: `-4`, or in quotes `"-2.5"`. A model that knows nothing gives about the
    /// negative logarithm of its vocabulary's size, -11 or -12. A good model gives nearly 0 for a prompt that it knows.
    #[x_kube(validation = Rule::new("string(self).matches('^(0|-(0|[1-9][0-9]{0,2})([.][0-9]{1,3})?)$')")
        .message("a log-prob must be a number from -999.999 to 0 with at most three decimals, such as -4 or \"-2.5\""))]
    pub min_log_prob: IntOrString,
}

fn one() -> i32 {
    1
}

impl Canary {
    /// The canary in the agents' protocol. An invalid number becomes a range that no engine can meet.
    pub fn policy(&self) -> CanaryPolicy {
        CanaryPolicy {
            prompt: self.prompt.clone(),
            max_tokens: u32::try_from(self.max_tokens).unwrap_or(1).max(1),
            least_log_prob_milli: milli(&self.min_log_prob).unwrap_or(1),
            greatest_log_prob_milli: 0,
        }
    }

    /// Violated rules, as field and message.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        let mut expect = |holds: bool, field, message: &str| {
            if !holds {
                problems.push((field, message.to_owned()));
            }
        };
        expect((1..=4096).contains(&self.prompt.chars().count()), "canary.prompt", "it must have 1 to 4096 characters");
        expect((1..=64).contains(&self.max_tokens), "canary.maxTokens", "it must be from 1 to 64");
        let message = "a log-prob must be a number from -999.999 to 0 with at most three decimals, such as -4 or \"-2.5\"";
        expect(milli(&self.min_log_prob).is_some(), "canary.minLogProb", message);
        problems
    }
}

/// A log-prob in thousandths; `None` if it is invalid.
fn milli(number: &IntOrString) -> Option<i32> {
    let text = match number {
        IntOrString::Int(number) => number.to_string(),
        IntOrString::String(text) => text.clone(),
    };
    if text == "0" {
        return Some(0);
    }
    let (whole, decimals) = text.strip_prefix('-').map(|digits| digits.split_once('.').unwrap_or((digits, "0")))?;
    let digits = |text: &str, most: usize| (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole, 3) || !digits(decimals, 3) || (whole.len() > 1 && whole.starts_with('0')) {
        return None;
    }
    let thousandths: i32 = format!("{decimals:0<3}").parse().ok()?;
    Some(-(whole.parse::<i32>().ok()? * 1000 + thousandths))
}
