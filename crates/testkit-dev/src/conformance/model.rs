//! The small models of simulated servers: names, types and shapes, with bytes that follow from a seed.

use std::path::Path;

use serde_json::json;

use weightsync_core::weights::Dtype;
use weightsync_core::weights::safetensors::SINGLE_FILE;

#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) tensors: Vec<(String, Dtype, Vec<u64>)>,
    /// Whether the output layer is the embedding, and has no tensor of its own.
    pub(super) tied: bool,
}

impl Model {
    /// A toy transformer.
    pub(super) fn small() -> Self {
        let shapes: [(&str, &[u64]); 6] = [
            ("model.embed_tokens.weight", &[16, 8]),
            ("model.layers.0.self_attn.q_proj.weight", &[8, 8]),
            ("model.layers.0.self_attn.k_proj.weight", &[8, 8]),
            ("model.layers.0.self_attn.v_proj.weight", &[8, 8]),
            ("model.norm.weight", &[8]),
            ("lm_head.weight", &[16, 8]),
        ];
        let tensors = shapes.map(|(name, shape)| (name.to_owned(), Dtype::BF16, shape.to_vec())).to_vec();
        Self { tensors, tied: false }
    }

    /// Writes a checkpoint of one file.
    pub(super) fn write(&self, directory: &Path, seed: u64) -> std::io::Result<()> {
        std::fs::create_dir_all(directory)?;
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (index, (name, dtype, shape)) in self.tensors.iter().enumerate() {
            let begin = data.len();
            let bytes = dtype.tensor_bytes(shape).map_err(|_| std::io::Error::other("a shape that no tensor has"))?;
            let key = blake3::hash(format!("{seed} {index}").as_bytes());
            let mut values = blake3::Hasher::new_keyed(key.as_bytes()).finalize_xof();
            let mut part = vec![0; usize::try_from(bytes).map_err(std::io::Error::other)?];
            values.fill(&mut part);
            // Without the highest bit of its exponent no number is infinite or a NaN: a small tensor of nothing else is what a canary refuses.
            let width = usize::try_from(dtype.bits() / 8).unwrap_or(1).max(1);
            part.chunks_mut(width).filter_map(<[u8]>::last_mut).for_each(|last| *last &= 0xbf);
            data.extend(part);
            header.insert(name.clone(), json!({"dtype": format!("{dtype:?}"), "shape": shape, "data_offsets": [begin, data.len()]}));
        }
        let header = serde_json::to_vec(&header)?;
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend(data);
        std::fs::write(directory.join(SINGLE_FILE), file)?;
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "tie_word_embeddings": self.tied,
        });
        std::fs::write(directory.join("config.json"), config.to_string())
    }
}
