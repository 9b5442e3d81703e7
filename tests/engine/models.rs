//! Checkpoints for the tests: three versions of one model, and broken ones.
//!
//! With a virtual environment they are small real Qwen3 checkpoints; without, tensors of the same names that only a simulator can serve.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::real::venv;

/// Folder with `1`, `2`, `3` (versions), `missing` (version 2 without one tensor), `unknown` (with one more), `misfit` (one of another
/// shape), `retyped` (one whose bits are labelled as integers), `nan` (one of NaN) and `half` (version 2 in two files, the second cut short).
pub struct Models {
    folder: PathBuf,
}

impl Models {
    /// All tests read the same, which lie in the target folder: only what makes them changes them.
    pub fn made() -> &'static Self {
        static MADE: OnceLock<Models> = OnceLock::new();
        MADE.get_or_init(|| {
            let venv = venv();
            let makers = concat!(include_str!("make_checkpoint.py"), include_str!("models.rs"));
            let kind = if venv.is_some() { "real" } else { "by-hand" };
            let parent = Path::new(env!("CARGO_TARGET_TMPDIR"));
            let made = parent.join(format!("engine-models-{kind}-{}", &blake3::hash(makers.as_bytes()).to_hex()[..16]));
            if !made.exists() {
                let unfinished = TempDir::new_in(parent).unwrap();
                Self { folder: unfinished.path().to_owned() }.make(venv.as_deref());
                // Another run may have been faster.
                assert!(std::fs::rename(unfinished.path(), &made).is_ok() || made.exists(), "{}", made.display());
            }
            Self { folder: made }
        })
    }

    fn make(&self, venv: Option<&Path>) {
        match venv {
            Some(venv) => self.with_python(venv),
            None => (1..=3).for_each(|version| self.by_hand(version)),
        }
        self.broken();
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn with_python(&self, venv: &Path) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/engine/make_checkpoint.py");
        let mut python = Command::new(venv.join("bin/python"));
        let made = python.arg(script).arg(&self.folder).args(["--seed", "1", "2", "3"]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }

    fn by_hand(&self, version: u8) {
        let directory = self.path(&version.to_string());
        std::fs::create_dir(&directory).unwrap();
        let mut tensors = Tensors::new();
        for (index, name) in ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"].into_iter().enumerate() {
            tensors.insert(name.to_owned(), Tensor::bf16(json!([4, 2]), vec![version + u8::try_from(index).unwrap(); 16]));
        }
        for layer in 0..2 {
            for part in ["q_proj", "k_proj", "v_proj"] {
                tensors
                    .insert(format!("model.layers.{layer}.self_attn.{part}.weight"), Tensor::bf16(json!([2, 2]), vec![version + layer; 8]));
            }
        }
        write(&directory.join("model.safetensors"), &tensors);
    }

    fn broken(&self) {
        let whole = read(&self.path("2").join("model.safetensors"));
        let one = "model.layers.1.self_attn.v_proj.weight";
        let mut missing = whole.clone();
        missing.remove(one);
        self.copy_of_2("missing", &missing);
        let mut unknown = whole.clone();
        unknown.insert("model.layers.0.nonsense.weight".to_owned(), Tensor::bf16(json!([1, 2]), vec![0; 4]));
        self.copy_of_2("unknown", &unknown);
        let mut misfit = whole.clone();
        misfit.insert(one.to_owned(), Tensor::bf16(json!([1, 2]), vec![0; 4]));
        self.copy_of_2("misfit", &misfit);
        let mut retyped = whole.clone();
        retyped.entry(one.to_owned()).and_modify(|tensor| "I16".clone_into(&mut tensor.dtype));
        self.copy_of_2("retyped", &retyped);
        let mut nan = whole.clone();
        // All bits set is a NaN in every type of float.
        nan.entry(one.to_owned()).and_modify(|tensor| tensor.bytes.fill(0xff));
        self.copy_of_2("nan", &nan);

        // The first file ends in the middle of a layer whose q, k and v are loaded together.
        let is_first = |name: &String| !name.contains("layers.1.") || name.contains("q_proj") || name.contains("k_proj");
        let (first, second): (Tensors, Tensors) = whole.into_iter().partition(|(name, _)| is_first(name));
        self.copy_of_2("half", &first);
        let half = self.path("half");
        std::fs::rename(half.join("model.safetensors"), half.join("model-00001-of-00002.safetensors")).unwrap();
        let cut = half.join("model-00002-of-00002.safetensors");
        write(&cut, &second);
        let bytes = std::fs::read(&cut).unwrap();
        std::fs::write(&cut, &bytes[..bytes.len() - 1]).unwrap();
        let files = [(&first, "model-00001-of-00002.safetensors"), (&second, "model-00002-of-00002.safetensors")];
        let map: Map<String, Value> =
            files.iter().flat_map(|(tensors, file)| tensors.keys().map(move |name| (name.clone(), json!(file)))).collect();
        std::fs::write(half.join("model.safetensors.index.json"), json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    }

    fn copy_of_2(&self, name: &str, tensors: &Tensors) {
        let to = self.path(name);
        std::fs::create_dir(&to).unwrap();
        for entry in std::fs::read_dir(self.path("2")).unwrap() {
            let from = entry.unwrap().path();
            std::fs::copy(&from, to.join(from.file_name().unwrap())).unwrap();
        }
        write(&to.join("model.safetensors"), tensors);
    }
}

/// One tensor of a safetensors file.
#[derive(Clone)]
struct Tensor {
    dtype: String,
    shape: Value,
    bytes: Vec<u8>,
}

impl Tensor {
    fn bf16(shape: Value, bytes: Vec<u8>) -> Self {
        Self { dtype: "BF16".to_owned(), shape, bytes }
    }
}

type Tensors = BTreeMap<String, Tensor>;

fn write(path: &Path, tensors: &Tensors) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    for (name, Tensor { dtype, shape, bytes }) in tensors {
        let begin = data.len();
        data.extend_from_slice(bytes);
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

fn read(path: &Path) -> Tensors {
    let file = std::fs::read(path).unwrap();
    let length = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let data = &file[8 + length..];
    let place = |value: &Value, index: usize| usize::try_from(value["data_offsets"][index].as_u64().unwrap()).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    let tensor = |value: &Value| Tensor {
        dtype: value["dtype"].as_str().unwrap().to_owned(),
        shape: value["shape"].clone(),
        bytes: data[place(value, 0)..place(value, 1)].to_vec(),
    };
    tensors.map(|(name, value)| (name, tensor(&value))).collect()
}
