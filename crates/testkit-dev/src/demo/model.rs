//! Weights of the demo: tensors of a layout, filled by a seed and a version, so that a version can be computed again instead of kept.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;

use weightsync_core::weights::safetensors::{Checkpoint, SafetensorsPlan};
use weightsync_core::weights::{Bucket, DigestAlgorithm, Dtype, Layout, TensorHasher, TensorSpec, digest_hex};

pub enum Weights {
    Seeded { layout: Arc<Layout>, seed: u64 },
    Checkpoint(Checkpoint),
}

/// Length in bytes of the longest of [`tensors`].
pub const LONGEST_TENSOR: u64 = 1024 * 512 * 2;

/// Tensors of a toy transformer of about `mebibytes` MiB.
pub fn tensors(mebibytes: u32) -> Vec<TensorSpec> {
    let spec = |name: String, dtype, shape: &[u64]| TensorSpec::new(name, dtype, shape.to_vec());
    let mut all = vec![spec("model.embed_tokens.weight".into(), Dtype::BF16, &[1024, 512])];
    // 2 MiB a layer: four square projections and two norms.
    let layers = u64::from(mebibytes).saturating_sub(2) / 2;
    for layer in 0..layers {
        for projection in ["q", "k", "v", "o"] {
            all.push(spec(format!("model.layers.{layer}.self_attn.{projection}_proj.weight"), Dtype::BF16, &[512, 512]));
        }
        all.push(spec(format!("model.layers.{layer}.input_layernorm.weight"), Dtype::F32, &[512]));
    }
    all.push(spec("model.norm.weight".into(), Dtype::F32, &[512]));
    all.push(spec("lm_head.weight".into(), Dtype::BF16, &[1024, 512]));
    all
}

impl Weights {
    pub fn seeded(tensors: Vec<TensorSpec>, bucket_bytes: u64, seed: u64) -> anyhow::Result<Self> {
        let layout = Layout::new("model", tensors, bucket_bytes).context("the demo's tensors make no layout")?;
        Ok(Self::Seeded { layout: Arc::new(layout), seed })
    }

    pub fn specs(&self) -> Vec<TensorSpec> {
        match self {
            Self::Seeded { layout, .. } => layout.tensors().cloned().collect(),
            Self::Checkpoint(checkpoint) => checkpoint.specs(),
        }
    }

    pub fn fill(&self, layout: &Layout, bucket: Bucket, into: &mut [u8]) -> anyhow::Result<()> {
        match self {
            Self::Seeded { seed, .. } => {
                into.fill(0);
                for part in layout.parts(bucket.offset, bucket.bytes) {
                    let start = usize::try_from(part.in_range)?;
                    let end = start + usize::try_from(part.bytes)?;
                    let key = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(part.index as u64);
                    pattern(key, part.in_tensor, into.get_mut(start..end).context("a bucket is shorter than its tensors")?);
                }
                Ok(())
            }
            Self::Checkpoint(checkpoint) => Ok(checkpoint.read_stream(layout, bucket.offset, into)?),
        }
    }

    /// Name and xxh3-128 (hex) of every tensor.
    pub fn digests(&self) -> anyhow::Result<Vec<(String, String)>> {
        let layout = match self {
            Self::Seeded { layout, .. } => layout.clone(),
            Self::Checkpoint(checkpoint) => Arc::new(Layout::new("model", checkpoint.specs(), 8 << 20)?),
        };
        let mut hasher = TensorHasher::new(layout.clone(), DigestAlgorithm::Xxh3_128);
        let mut buffer = Vec::new();
        for bucket in layout.buckets() {
            buffer.resize(usize::try_from(bucket.bytes)?, 0);
            self.fill(&layout, bucket, &mut buffer)?;
            hasher.update(&buffer)?;
        }
        let digests = hasher.finish()?;
        Ok(layout.tensors().map(|tensor| tensor.name.clone()).zip(digests.into_iter().map(digest_hex)).collect())
    }

    /// Writes them as a safetensors checkpoint.
    pub fn save(&self, folder: &Path) -> anyhow::Result<()> {
        let Self::Seeded { layout, .. } = self else { return Ok(()) };
        fs::create_dir_all(folder)?;
        let plan = SafetensorsPlan::new(layout, None)?;
        let mut files = Vec::new();
        for planned in &plan.files {
            let file = File::create(folder.join(&planned.name)).with_context(|| format!("{} cannot be written", folder.display()))?;
            file.set_len(planned.bytes)?;
            file.write_all_at(&planned.header, 0)?;
            files.push(file);
        }
        let mut buffer = Vec::new();
        for bucket in layout.buckets() {
            buffer.resize(usize::try_from(bucket.bytes)?, 0);
            self.fill(layout, bucket, &mut buffer)?;
            for segment in plan.segments(layout, bucket.offset, bucket.bytes) {
                let start = usize::try_from(segment.in_part)?;
                let part = buffer.get(start..start + usize::try_from(segment.bytes)?).context("a segment lies outside its bucket")?;
                files.get(segment.file).context("a segment names no file")?.write_all_at(part, segment.file_offset)?;
            }
        }
        fs::write(folder.join("config.json"), r#"{"architectures":["DemoForCausalLM"],"model_type":"demo"}"#)?;
        Ok(())
    }
}

/// Bytes `from..` of an endless run that depends on `key` alone (splitmix64, eight bytes a step).
fn pattern(key: u64, from: u64, into: &mut [u8]) {
    let word = |index: u64| {
        let mut z = key.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let lead = usize::try_from(from % 8).unwrap_or(0);
    let mut index = from / 8;
    let mut rest = into;
    if lead > 0 {
        let bytes = word(index).to_le_bytes();
        let (head, tail) = rest.split_at_mut((8 - lead).min(rest.len()));
        for (to, from) in head.iter_mut().zip(bytes.iter().skip(lead)) {
            *to = *from;
        }
        rest = tail;
        index += 1;
    }
    // Whole words by themselves: byte by byte, a debug build would spend most of its time here.
    let mut words = rest.chunks_exact_mut(8);
    for chunk in &mut words {
        chunk.copy_from_slice(&word(index).to_le_bytes());
        index += 1;
    }
    for (to, from) in words.into_remainder().iter_mut().zip(word(index).to_le_bytes()) {
        *to = from;
    }
}

#[cfg(test)]
mod tests {
    use super::{Weights, pattern, tensors};
    use weightsync_core::weights::safetensors::Checkpoint;

    #[test]
    fn a_pattern_is_the_same_however_it_is_cut() {
        let mut whole = [0; 100];
        pattern(7, 0, &mut whole);
        for cut in 0..100 {
            let (mut head, mut tail) = (vec![0; cut], vec![0; 100 - cut]);
            pattern(7, 0, &mut head);
            pattern(7, cut as u64, &mut tail);
            assert_eq!([head, tail].concat(), whole, "cut at {cut}");
        }
    }

    #[test]
    fn a_saved_version_is_the_computed_one() {
        let folder = tempfile::tempdir().unwrap();
        let weights = Weights::seeded(tensors(8), 1 << 20, 3).unwrap();
        weights.save(folder.path()).unwrap();
        let mut read = Weights::Checkpoint(Checkpoint::open(folder.path()).unwrap()).digests().unwrap();
        let mut computed = weights.digests().unwrap();
        read.sort();
        computed.sort();
        assert_eq!(read, computed);
        assert_ne!(computed, Weights::seeded(tensors(8), 1 << 20, 4).unwrap().digests().unwrap());
    }
}
