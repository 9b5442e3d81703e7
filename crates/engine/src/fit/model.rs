//! What the configuration of a model says about tensors that an engine's loader skips.
//!
//! Decides by `config.json` of the engine's checkpoint, and by names alone where that says nothing. Facts are of transformers 5.19 and vLLM
//! 0.32. It never calls a tensor skipped that the engine would keep with old values: in doubt a tensor is needed.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

/// Longest configuration that is read.
const MOST_BYTES: u64 = 16 << 20;
/// Configurations inside configurations, such as `thinker_config.text_config`.
const DEPTH: usize = 3;
/// Configurations of a language model inside that of a larger model.
const LANGUAGE: [&str; 7] = ["text_config", "llm_config", "language_config", "language_model_config", "llm", "decoder", "thinker_config"];
/// Counts of layers that predict further tokens, under the names of several models.
const NEXT_N: [&str; 5] = ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers"];

/// Types whose embedding and head are one tensor where no flag says otherwise: the default of their configuration class.
const TIED_BY_DEFAULT: [&str; 59] = [
    "aya_vision",
    "bloom",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere2_vision",
    "cohere_compass_text",
    "diffusion_gemma",
    "ernie4_5",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "falcon",
    "falcon_mamba",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_assistant",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_assistant",
    "gemma4_unified_text",
    "got_ocr2",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "granite_swa",
    "hunyuan_vl",
    "jetmoe",
    "lfm2",
    "lfm2_moe",
    "lfm2_vl",
    "mamba",
    "minicpm3",
    "modernbert-decoder",
    "mpt",
    "opt",
    "paddleocr_vl",
    "paligemma",
    "pp_chart2table",
    "qwen3_asr",
    "recurrent_gemma",
    "shieldgemma2",
    "smollm3",
    "starcoder2",
    "t5gemma2",
    "vaultgemma",
    "voxtral_realtime",
    "whisper",
    "xglm",
    "xlnet",
    "youtu",
    "zamba",
    "zamba2",
    "zaya",
];

/// Types whose configuration takes the flag of the language model inside where that says `true` and its own says `false`: files from before
/// transformers 5 have it only there.
const INNER_FLAG_COUNTS: [&str; 13] = [
    "fast_vlm",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "hunyuan_vl",
    "llava",
    "llava_next_video",
    "llava_onevision",
    "minimax_m3_vl",
    "paddleocr_vl",
    "qwen2_5_vl",
    "qwen2_vl",
    "video_llama_3",
];

/// Whether the head is the embedding under another name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Tie {
    /// No configuration says so.
    #[default]
    No,
    /// Flags contradict each other: an engine may build a head of its own.
    Doubtful,
    Yes,
}

/// A count of layers, after which those come that predict further tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NextN {
    /// None where the configuration leaves the count to the class of the model.
    after: Option<u64>,
    count: u64,
}

/// What the configuration says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Model {
    pub(super) tie: Tie,
    next_n: Vec<NextN>,
}

impl Model {
    /// That of the checkpoint in this directory; says nothing if there is none.
    pub(super) fn read(served: &Path) -> Self {
        let mut text = Vec::new();
        let read = File::open(served.join("config.json")).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut text));
        let config: Value = read.ok().and_then(|_| serde_json::from_slice(&text).ok()).unwrap_or_default();
        Self::of(&config)
    }

    /// A model of which only that is known.
    pub(super) fn tied(tied: bool) -> Self {
        Self { tie: if tied { Tie::Yes } else { Tie::No }, next_n: Vec::new() }
    }

    pub(super) fn of(config: &Value) -> Self {
        let Some(top) = config.as_object() else { return Self::default() };
        let mut all = vec![top];
        inner(top, DEPTH, &mut all);
        let next_n = all.iter().filter_map(|config| next_n(config)).collect();
        Self { tie: tie(top, all.get(1..).unwrap_or_default()), next_n }
    }

    /// Whether the model has layers that predict further tokens.
    pub(super) fn predicts(&self) -> bool {
        !self.next_n.is_empty()
    }

    /// Whether a tensor belongs to a layer that predicts further tokens. `is_there` says whether the model has a tensor of that name.
    pub(super) fn is_of_next_n(&self, name: &str, is_there: &dyn Fn(&str) -> bool) -> bool {
        if name.split('.').any(|part| part.starts_with("mtp") || part == "nextn") {
            return true;
        }
        let Some((before, layer, number)) = layer_of(name) else { return false };
        self.next_n.iter().any(|NextN { after, count }| match after {
            Some(after) => (*after..after.saturating_add(*count)).contains(&number),
            // Only such a layer projects an embedding and a hidden state into one.
            None => is_there(&format!("{before}{layer}.eh_proj.weight")),
        })
    }
}

/// The configurations of language models inside a configuration, the outer ones first.
fn inner<'a>(config: &'a Map<String, Value>, depth: usize, found: &mut Vec<&'a Map<String, Value>>) {
    if depth == 0 {
        return;
    }
    for name in LANGUAGE {
        if let Some(config) = config.get(name).and_then(Value::as_object) {
            found.push(config);
            inner(config, depth - 1, found);
        }
    }
}

fn next_n(config: &Map<String, Value>) -> Option<NextN> {
    let count = NEXT_N.iter().filter_map(|name| config.get(*name).and_then(Value::as_u64)).max().filter(|count| *count > 0)?;
    Some(NextN { after: config.get("num_hidden_layers").and_then(Value::as_u64), count })
}

fn tie(top: &Map<String, Value>, inside: &[&Map<String, Value>]) -> Tie {
    let flag = |config: &Map<String, Value>| config.get("tie_word_embeddings").and_then(Value::as_bool);
    let kind = |config: &Map<String, Value>| config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let own = flag(top);
    let within: Vec<bool> = inside.iter().filter_map(|config| flag(config)).collect();
    let tied_within = within.contains(&true);
    match own {
        Some(true) => Tie::Yes,
        _ if tied_within && (own.is_none() || INNER_FLAG_COUNTS.contains(&kind(top).as_str())) => Tie::Yes,
        Some(false) if tied_within => Tie::Doubtful,
        Some(false) => Tie::No,
        None if within.contains(&false) => Tie::No,
        None => {
            let by_default = |config: &Map<String, Value>| TIED_BY_DEFAULT.contains(&kind(config).as_str());
            if by_default(top) || inside.iter().any(|config| by_default(config)) { Tie::Yes } else { Tie::No }
        }
    }
}

/// The part of a name before the number of a layer of the language model, the number as it is written, and its value.
fn layer_of(name: &str) -> Option<(&str, &str, u64)> {
    let start = name.find("layers.").filter(|start| *start == 0 || name.as_bytes().get(start - 1) == Some(&b'.'))?;
    let (before, rest) = name.split_at_checked(start + "layers.".len())?;
    let other = |part: &str| ["vision", "visual", "audio", "encoder"].iter().any(|tower| part.contains(tower));
    if before.split('.').any(other) {
        return None;
    }
    let (number, _) = rest.split_once('.')?;
    Some((before, number, number.parse().ok()?))
}
