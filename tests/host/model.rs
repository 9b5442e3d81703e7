//! Small checkpoints whose every byte follows from a seed, and what an engine that serves them must say.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use weightsync_core::weights::{Bucket, Dtype, Layout, TensorSpec, digest_hex, tensor_digest};

/// Weights of one version.
#[derive(Clone)]
pub struct Model {
    seed: u64,
    /// Names, and lengths in float32.
    tensors: Vec<(String, u64)>,
    /// The tensor that is nothing but NaN.
    nan: Option<usize>,
}

impl Model {
    /// 1 MiB in 16 tensors.
    pub fn small(seed: u64) -> Self {
        Self::of(seed, (0..16).map(|layer| (format!("model.layers.{layer}.mlp.weight"), 16 << 10)))
    }

    /// 8 MiB in 8 tensors: an update has a middle.
    pub fn large(seed: u64) -> Self {
        Self::of(seed, (0..8).map(|layer| (format!("model.layers.{layer}.mlp.weight"), 256 << 10)))
    }

    /// These tensors.
    pub fn of(seed: u64, tensors: impl IntoIterator<Item = (String, u64)>) -> Self {
        Self { seed, tensors: tensors.into_iter().collect(), nan: None }
    }

    /// The same without one tensor.
    pub fn without(self, name: &str) -> Self {
        let tensors = self.tensors.into_iter().filter(|(tensor, _)| tensor != name).collect();
        Self { tensors, ..self }
    }

    /// The same with one tensor of NaN.
    pub fn poisoned(self, number: usize) -> Self {
        Self { nan: Some(number), ..self }
    }

    /// Bytes of a tensor.
    pub fn bytes(&self, number: usize) -> Vec<u8> {
        let (_, length) = self.tensors[number];
        if self.nan == Some(number) {
            return f32::NAN.to_le_bytes().repeat(usize::try_from(length).unwrap());
        }
        let mut state = (self.seed << 32 | number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut bytes = Vec::with_capacity(usize::try_from(length * 4).unwrap());
        for _ in 0..length / 2 {
            // xorshift64: fast in a debug build as well.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend(state.to_le_bytes());
        }
        bytes
    }

    /// As a trainer announces them.
    pub fn specs(&self) -> Vec<TensorSpec> {
        let spec = |(name, length): &(String, u64)| TensorSpec::new(name.clone(), Dtype::F32, vec![*length]);
        self.tensors.iter().map(spec).collect()
    }

    /// Writes one bucket of the stream.
    pub fn fill(&self, layout: &Layout, bucket: Bucket, into: &mut [u8]) {
        for part in layout.parts(bucket.offset, bucket.bytes) {
            let at = |value: u64| usize::try_from(value).unwrap();
            let name = &layout.tensors().nth(part.index).unwrap().name;
            let number = self.tensors.iter().position(|(tensor, _)| tensor == name).unwrap();
            let from = &self.bytes(number)[at(part.in_tensor)..at(part.in_tensor + part.bytes)];
            into[at(part.in_range)..at(part.in_range + part.bytes)].copy_from_slice(from);
        }
    }

    /// Writes a checkpoint; answers its folder.
    pub fn save(&self, folder: &Path) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (number, (name, length)) in self.tensors.iter().enumerate() {
            let begin = data.len();
            data.extend(self.bytes(number));
            header.insert(name.clone(), json!({"dtype": "F32", "shape": [length], "data_offsets": [begin, data.len()]}));
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        std::fs::write(folder.join("model.safetensors"), file).unwrap();
        std::fs::write(folder.join("config.json"), r#"{"architectures":["SmallForCausalLM"],"model_type":"small"}"#).unwrap();
        folder.to_owned()
    }

    /// Name and digest of every tensor, as a simulator reports them.
    pub fn digests(&self) -> Value {
        let digest = |(number, (name, _)): (usize, &(String, u64))| (name.clone(), json!(digest_hex(tensor_digest(&self.bytes(number)))));
        Value::Object(self.tensors.iter().enumerate().map(digest).collect())
    }
}
