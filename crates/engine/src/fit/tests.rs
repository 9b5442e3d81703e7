//! Configurations and tensors of real models, both sides, and what must come of them.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Fit, check, compare_parameters, same_tensors};
use weightsync_core::weights::{Dtype, IgnoredTensors, TensorSpec};

const HEAD: &str = "lm_head.weight";

/// A tensor of the table: name, type, shape.
fn spec((name, dtype, shape): (&str, Dtype, &[u64])) -> TensorSpec {
    TensorSpec::new(name.into(), dtype, shape.to_vec())
}

fn bf16(names: &[&str]) -> Vec<TensorSpec> {
    names.iter().map(|name| spec((name, Dtype::BF16, &[4, 2]))).collect()
}

/// Writes a file whose tensors hold the byte that `value` gives for a name.
fn write(path: &Path, tensors: &[TensorSpec], value: impl Fn(&str) -> u8) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for tensor in tensors {
        let bytes = usize::try_from(tensor.dtype.tensor_bytes(&tensor.shape).unwrap()).unwrap();
        let place = json!([data.len(), data.len() + bytes]);
        data.extend(std::iter::repeat_n(value(&tensor.name), bytes));
        header.insert(tensor.name.clone(), json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": place}));
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    fs::write(path, file).unwrap();
}

/// A checkpoint whose head has the values of its embedding.
fn checkpoint(config: &Value, tensors: &[TensorSpec]) -> TempDir {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    write(&folder.path().join("model.safetensors"), tensors, |_| 7);
    folder
}

fn ignoring(patterns: &[&str]) -> IgnoredTensors {
    IgnoredTensors::new(patterns.iter().map(|pattern| (*pattern).to_owned()).collect())
}

/// The notes, or the refusal.
fn compared(served: &Path, version: &[TensorSpec], ignored: &[&str]) -> Result<Vec<String>, String> {
    match check(served, version, &ignoring(ignored)) {
        Ok(Fit::Whole { notes }) => Ok(notes),
        Ok(Fit::Unchecked { why, .. }) => panic!("{why}"),
        Err(error) => Err(error.to_string()),
    }
}

struct Case {
    what: &'static str,
    config: Value,
    files: &'static [&'static str],
    version: &'static [&'static str],
    /// A part of the refusal; taken without one.
    refused: Option<&'static str>,
}

const EMBED: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";
const VL_EMBED: &str = "model.language_model.embed_tokens.weight";
const VL_HEAD: &str = "language_model.lm_head.weight";

fn cases() -> Vec<Case> {
    let case = |what, config, files, version, refused| Case { what, config, files, version, refused };
    let llama = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": false});
    let deepseek =
        json!({"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "tie_word_embeddings": false});
    let glm = json!({"model_type": "glm4_moe", "num_hidden_layers": 92, "num_nextn_predict_layers": 1, "tie_word_embeddings": false});
    let qwen_next = json!({"model_type": "qwen3_next", "num_hidden_layers": 48, "tie_word_embeddings": false});
    let mimo = json!({"model_type": "mimo", "num_hidden_layers": 36, "num_nextn_predict_layers": 1, "tie_word_embeddings": false});
    let vl = |top: Value, inner: Value| {
        let mut config = json!({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text"}});
        if !top.is_null() {
            config["tie_word_embeddings"] = top;
        }
        if !inner.is_null() {
            config["text_config"]["tie_word_embeddings"] = inner;
        }
        config
    };
    let of = |kind: &str| json!({"model_type": kind});
    let tied = json!({"model_type": "qwen2", "tie_word_embeddings": true});
    vec![
        // Rotary tables and other buffers.
        case("Llama 2 files", llama.clone(), &[EMBED, HEAD, "model.layers.0.self_attn.rotary_emb.inv_freq"], &[EMBED, HEAD], None),
        case(
            "tables of the trainer alone",
            llama.clone(),
            &[EMBED, HEAD],
            &[EMBED, HEAD, "model.layers.0.self_attn.rotary_emb.inv_freq"],
            None,
        ),
        case("tables of a vision tower", llama.clone(), &[EMBED, HEAD, "visual.rotary_pos_emb.inv_freq"], &[EMBED, HEAD], None),
        case("cached tables", llama.clone(), &[EMBED, HEAD, "model.layers.0.self_attn.rotary_emb.cos_cached"], &[EMBED, HEAD], None),
        case("numbers of positions", llama.clone(), &[EMBED, HEAD, "vision_model.embeddings.position_ids"], &[EMBED, HEAD], None),
        case(
            "numbers of positions that no file has",
            llama.clone(),
            &[EMBED, HEAD],
            &[EMBED, HEAD, "vision_model.embeddings.position_ids"],
            Some("brings the unknown vision_model.embeddings.position_ids"),
        ),
        case(
            "a bias of attention",
            llama.clone(),
            &[EMBED, HEAD, "model.layers.0.attention.bias"],
            &[EMBED, HEAD],
            Some("lacks model.layers.0.attention.bias"),
        ),
        // Layers that predict further tokens.
        case(
            "DeepSeek V3",
            deepseek.clone(),
            &[EMBED, HEAD, "model.layers.60.a", "model.layers.61.eh_proj.weight", "model.layers.61.shared_head.head.weight"],
            &[EMBED, HEAD, "model.layers.60.a"],
            None,
        ),
        case(
            "DeepSeek V3 without its last layer",
            deepseek.clone(),
            &[EMBED, HEAD, "model.layers.60.a", "model.layers.61.eh_proj.weight"],
            &[EMBED, HEAD],
            Some("lacks model.layers.60.a"),
        ),
        case(
            "DeepSeek V3, more layers than its configuration has",
            deepseek.clone(),
            &[EMBED, HEAD, "model.layers.62.a"],
            &[EMBED, HEAD],
            Some("lacks model.layers.62.a"),
        ),
        case("DeepSeek V3, the trainer has them", deepseek, &[EMBED, HEAD], &[EMBED, HEAD, "model.layers.61.eh_proj.weight"], None),
        case("GLM 4.5", glm, &[EMBED, HEAD, "model.layers.92.enorm.weight"], &[EMBED, HEAD], None),
        case(
            "a count that only the class has",
            json!({"model_type": "glm4v_moe", "text_config": {"num_nextn_predict_layers": 1}}),
            &[EMBED, "model.language_model.layers.46.eh_proj.weight", "model.language_model.layers.46.norm.weight"],
            &[EMBED],
            None,
        ),
        case(
            "a layer of such a model that is none of these",
            json!({"model_type": "glm4v_moe", "text_config": {"num_nextn_predict_layers": 1}}),
            &[EMBED, "model.language_model.layers.45.norm.weight"],
            &[EMBED],
            Some("lacks model.language_model.layers.45.norm.weight"),
        ),
        case(
            "a deep tower",
            json!({"model_type": "x", "llm_config": {"num_hidden_layers": 28, "num_nextn_predict_layers": 1}}),
            &[EMBED, "vision_model.encoder.layers.28.a"],
            &[EMBED],
            Some("lacks vision_model.encoder.layers.28.a"),
        ),
        case("Qwen3-Next", qwen_next.clone(), &[EMBED, HEAD, "mtp.fc.weight", "mtp.layers.0.a"], &[EMBED, HEAD], None),
        case(
            "Qwen3-Next, files without them",
            qwen_next,
            &[EMBED, HEAD],
            &[EMBED, HEAD, "mtp.fc.weight"],
            Some("brings the unknown mtp.fc.weight"),
        ),
        case("MiMo", mimo, &[EMBED, HEAD, "model.mtp_layers.0.a"], &[EMBED, HEAD], None),
        // Heads.
        case("tied at the top, head of the trainer", tied.clone(), &[EMBED], &[EMBED, HEAD], None),
        case("tied at the top, head of the files", tied, &[EMBED, HEAD], &[EMBED], None),
        case("untied, no head in the version", llama.clone(), &[EMBED, HEAD], &[EMBED], Some("lacks lm_head.weight")),
        case("untied, no head in the files", llama, &[EMBED], &[EMBED, HEAD], Some("brings the unknown lm_head.weight")),
        case("Qwen2-VL, flag inside", vl(Value::Null, json!(true)), &[EMBED], &[EMBED, HEAD], None),
        case("Qwen2-VL, flag inside, head of the files", vl(json!(false), json!(true)), &[VL_EMBED, HEAD], &[VL_EMBED], None),
        case("Qwen2-VL, untied inside", vl(Value::Null, json!(false)), &[EMBED, HEAD], &[EMBED], Some("lacks lm_head.weight")),
        case("Qwen2-VL, flag outside", vl(json!(true), json!(false)), &[EMBED, HEAD], &[EMBED], None),
        case(
            "flags that contradict each other, head of the files",
            json!({"model_type": "internvl", "tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}),
            &[EMBED, VL_HEAD],
            &[EMBED],
            Some("lacks language_model.lm_head.weight"),
        ),
        case(
            "flags that contradict each other, head of the trainer",
            json!({"model_type": "internvl", "tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}),
            &[EMBED],
            &[EMBED, VL_HEAD],
            None,
        ),
        case(
            "InternVL, flag of its language model",
            json!({"model_type": "internvl_chat", "llm_config": {"tie_word_embeddings": true}}),
            &[EMBED],
            &[EMBED, VL_HEAD],
            None,
        ),
        case(
            "a thinker's flag",
            json!({"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {"tie_word_embeddings": true}}}),
            &[EMBED],
            &[EMBED, "thinker.lm_head.weight"],
            None,
        ),
        case("Gemma without a flag, head of the trainer", of("gemma2"), &[EMBED], &[EMBED, HEAD], None),
        case("Gemma without a flag, head of the files", of("gemma"), &[EMBED, HEAD], &[EMBED], None),
        case(
            "Gemma 3 by the type inside",
            json!({"model_type": "other", "text_config": {"model_type": "gemma3_text"}}),
            &[EMBED, VL_HEAD],
            &[EMBED],
            None,
        ),
        case(
            "Gemma with a flag",
            json!({"model_type": "gemma2", "tie_word_embeddings": false}),
            &[EMBED, HEAD],
            &[EMBED],
            Some("lacks lm_head.weight"),
        ),
        case("Llama without a flag", of("llama"), &[EMBED, HEAD], &[EMBED], Some("lacks lm_head.weight")),
        case(
            "a name that only ends so",
            of("gemma"),
            &[EMBED, "model.other_lm_head.weight"],
            &[EMBED],
            Some("lacks model.other_lm_head.weight"),
        ),
        case("no configuration", Value::Null, &[EMBED, HEAD], &[EMBED], Some("lacks lm_head.weight")),
        // All else.
        case("a norm", of("gemma"), &[EMBED, NORM], &[EMBED], Some("lacks model.norm.weight")),
        case("an unknown norm", of("gemma"), &[EMBED], &[EMBED, NORM], Some("brings the unknown model.norm.weight")),
    ]
}

#[test]
fn versions_of_real_models_are_taken_or_refused() {
    for Case { what, config, files, version, refused } in cases() {
        let served = checkpoint(&config, &bf16(files));
        let found = compared(served.path(), &bf16(version), &[]);
        match (&found, refused) {
            (Ok(_), None) => {}
            (Err(error), Some(named)) if error.contains(named) => {
                assert!(error.contains("spec.rollouts[].engine.tensors.ignore"), "{what}: {error}");
            }
            _ => panic!("{what}: {found:?}, not {refused:?}"),
        }
    }
}

/// vLLM 0.32 uses the head of such files as untied.
#[test]
fn tied_head_of_files_with_own_values_must_come() {
    let config = json!({"model_type": "gemma2"});
    let served = checkpoint(&config, &bf16(&[EMBED, HEAD]));
    compared(served.path(), &bf16(&[EMBED]), &[]).unwrap();
    write(&served.path().join("model.safetensors"), &bf16(&[EMBED, HEAD]), |name| u8::from(name == HEAD));
    let error = compared(served.path(), &bf16(&[EMBED]), &[]).unwrap_err();
    assert!(error.contains("lacks lm_head.weight"), "{error}");
}

#[test]
fn ignored_tensors_are_neither_lacking_nor_unknown() {
    let served = checkpoint(&json!({}), &bf16(&["a", "b.bias", "c.bias"]));
    let error = compared(served.path(), &bf16(&["a", "x.scale"]), &[]).unwrap_err();
    assert!(error.contains("lacks b.bias, c.bias, and brings the unknown x.scale"), "{error}");
    let notes = compared(served.path(), &bf16(&["a", "x.scale"]), &["*.bias", "x.*"]).unwrap();
    assert_eq!(notes, ["the version lacks tensors that engine.tensors.ignore names, so the engine keeps its own: b.bias, c.bias"]);
    let error = compared(served.path(), &bf16(&["a"]), &["b.*"]).unwrap_err();
    assert!(error.contains("lacks c.bias"), "{error}");
    // What comes must still fit: the engine would read it.
    let error =
        compared(served.path(), &[spec(("a", Dtype::BF16, &[1])), spec(("b.bias", Dtype::BF16, &[4, 2]))], &["a", "c.bias"]).unwrap_err();
    assert!(error.contains("a ([1], not [4, 2])"), "{error}");
}

#[test]
fn less_precision_is_named_and_taken() {
    let bias = "model.layers.3.mlp.gate.e_score_correction_bias";
    let served = checkpoint(&json!({}), &[spec(("a", Dtype::BF16, &[2])), spec((bias, Dtype::F32, &[2])), spec(("i", Dtype::I64, &[2]))]);
    let version = |dtype| [spec(("a", Dtype::BF16, &[2])), spec((bias, dtype, &[2])), spec(("i", Dtype::I64, &[2]))];
    let none: [&str; 0] = [];
    assert_eq!(compared(served.path(), &version(Dtype::F32), &[]).unwrap(), none);
    assert_eq!(compared(served.path(), &version(Dtype::F64), &[]).unwrap(), none);
    for dtype in [Dtype::BF16, Dtype::F16] {
        let notes = compared(served.path(), &version(dtype), &[]).unwrap();
        let wanted = format!("tensors come in less precision than the engine's checkpoint has: {bias} ({}, not F32)", dtype.name());
        assert_eq!(notes, [wanted]);
    }
    for dtype in [Dtype::I16, Dtype::F8_E4M3, Dtype::BOOL] {
        let error = compared(served.path(), &version(dtype), &[]).unwrap_err();
        assert!(error.contains(&format!("brings in another element type {bias} ({}, not F32)", dtype.name())), "{error}");
    }
    // More precision is rounded by the engine, and a table that it computes itself counts for nothing.
    let served = checkpoint(&json!({}), &[spec(("a", Dtype::BF16, &[2])), spec(("rotary_emb.inv_freq", Dtype::F32, &[2]))]);
    let version = [spec(("a", Dtype::F32, &[2])), spec(("rotary_emb.inv_freq", Dtype::BF16, &[1]))];
    assert_eq!(compared(served.path(), &version, &[]).unwrap(), none);
}

#[test]
fn index_chooses_files_and_all_their_tensors_count() {
    let served = TempDir::new().unwrap();
    let path = |name: &str| served.path().join(name);
    write(&path("a.safetensors"), &bf16(&["a", HEAD]), |_| 1);
    write(&path("stale.safetensors"), &bf16(&["old"]), |_| 1);
    let index = |map: Value| fs::write(path("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    index(json!({"a": "a.safetensors"}));
    let error = compared(served.path(), &bf16(&["a"]), &[]).unwrap_err();
    assert!(error.contains("lacks lm_head.weight") && !error.contains("old"), "{error}");
    compared(served.path(), &bf16(&["a", HEAD]), &[]).unwrap();
    // A name that no file has is loaded by no engine.
    index(json!({"a": "a.safetensors", "gone": "a.safetensors"}));
    compared(served.path(), &bf16(&["a", HEAD]), &[]).unwrap();
    // Without an index all files count.
    fs::remove_file(path("model.safetensors.index.json")).unwrap();
    let error = compared(served.path(), &bf16(&["a", HEAD]), &[]).unwrap_err();
    assert!(error.contains("lacks old"), "{error}");
}

#[test]
fn files_that_cannot_be_compared_are_named() {
    let served = TempDir::new().unwrap();
    let why = |ties: bool| match check(served.path(), &bf16(&["a"]), &ignoring(&[])).unwrap() {
        Fit::Unchecked { why, tied } => {
            assert_eq!(tied, ties);
            why
        }
        Fit::Whole { .. } => panic!("there is nothing to compare with"),
    };
    fs::write(served.path().join("pytorch_model.bin"), "no pickle").unwrap();
    assert!(why(false).contains("holds no safetensors file (pickle is never read)"), "{}", why(false));
    fs::write(served.path().join("config.json"), json!({"model_type": "gemma"}).to_string()).unwrap();
    why(true);
    fs::write(served.path().join("model.safetensors"), [1, 2, 3]).unwrap();
    assert!(why(true).contains("model.safetensors: cut short"), "{}", why(true));
}

#[test]
fn version_before_is_compared_by_the_same_rules() {
    let before = bf16(&["a", HEAD, "model.rotary_emb.inv_freq", "x.bias"]);
    let same = |offered: &[&str], ignored: &[&str], tied| {
        same_tensors((3, &before), &bf16(offered), &ignoring(ignored), tied).map_err(|error| error.to_string())
    };
    same(&["a", HEAD, "x.bias", "new"], &[], false).unwrap();
    same(&["a", "x.bias"], &[], true).unwrap();
    same(&["a", HEAD], &["*.bias"], false).unwrap();
    let error = same(&["a"], &[], false).unwrap_err();
    assert!(
        error.contains("of version 3") && error.contains("lacks lm_head.weight, x.bias") && error.contains("tensors.ignore"),
        "{error}"
    );
}

#[test]
fn parameters_of_a_server_are_compared_name_by_name() {
    let parameters = bf16(&["a", "b", "c", "d", "e", HEAD]);
    let compared = |version: &[TensorSpec]| compare_parameters(&parameters, version, &ignoring(&[])).map_err(|error| error.to_string());
    compared(&parameters).unwrap();
    let error = compared(&bf16(&["a"])).unwrap_err();
    assert!(error.contains("lacks b, c, d and 2 more"), "{error}");
    let error = compared(&bf16(&["a", "b", "c", "d", "e", HEAD, "f"])).unwrap_err();
    assert!(error.contains("brings the unknown f"), "{error}");
}
