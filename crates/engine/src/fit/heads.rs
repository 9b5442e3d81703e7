//! Whether the head in an engine's files is the embedding once more.
//!
//! vLLM 0.32 loads a head that a checkpoint has although its configuration calls it tied, and ties it where both are equal
//! (`maybe_untie_word_embeddings`, `maybe_retie_word_embeddings`). So a version may lack such a head only where both are equal. Reads values
//! of the engine's own files for that, once for each state of a file; never those of a version.

use parking_lot::Mutex;

use weightsync_core::weights::safetensors::{Checkpoint, CheckpointTensor, FileStamp};

const HEAD: &str = "lm_head.weight";
/// Names of embeddings, in the order in which they are tried.
const EMBEDDINGS: [&str; 5] = ["embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "embeddings.weight"];
/// Bytes compared at once.
const PART: usize = 1 << 20;
/// Most answers that are kept.
const KEPT: usize = 16;

/// The head of a language model, under whatever prefix.
pub(super) fn is_head(name: &str) -> bool {
    name.strip_suffix(HEAD).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Two tensors of files in some state.
type Pair = [(String, FileStamp); 2];

/// Answers that were computed before.
static KNOWN: Mutex<Vec<(Pair, bool)>> = Mutex::new(Vec::new());

/// Whether a tensor of the files has the same values as an embedding in them. False where they cannot be read.
pub(super) fn is_an_embedding(checkpoint: &Checkpoint, head: &str) -> bool {
    let place = |name: &str| checkpoint.tensors().iter().position(|tensor| tensor.spec.name == name);
    let Some((at, found)) = place(head).and_then(|at| Some((at, checkpoint.tensors().get(at)?))) else { return false };
    let named = |tensor: &CheckpointTensor| EMBEDDINGS.iter().any(|name| tensor.spec.name.ends_with(name));
    let alike = |tensor: &CheckpointTensor| tensor.spec.shape == found.spec.shape && tensor.spec.dtype == found.spec.dtype;
    let others = checkpoint.tensors().iter().enumerate().filter(|(_, tensor)| named(tensor) && alike(tensor));
    others.map(|(other, _)| other).any(|other| are_equal(checkpoint, at, other, found.bytes))
}

fn are_equal(checkpoint: &Checkpoint, one: usize, other: usize, bytes: u64) -> bool {
    let of = |at: usize| Some((checkpoint.tensors().get(at)?.spec.name.clone(), checkpoint.stamp_of(at)?));
    let Some(key) = of(one).zip(of(other)).map(|(one, other)| [one, other]) else { return false };
    if let Some((_, known)) = KNOWN.lock().iter().find(|(known, _)| *known == key) {
        return *known;
    }
    let equal = have_equal_bytes(checkpoint, one, other, bytes);
    let mut known = KNOWN.lock();
    known.truncate(KEPT - 1);
    known.insert(0, (key, equal));
    equal
}

fn have_equal_bytes(checkpoint: &Checkpoint, one: usize, other: usize, bytes: u64) -> bool {
    let (mut first, mut second) = (vec![0; PART], vec![0; PART]);
    let mut offset = 0;
    while offset < bytes {
        let length = usize::try_from(bytes - offset).unwrap_or(PART).min(PART);
        let (Some(first), Some(second)) = (first.get_mut(..length), second.get_mut(..length)) else { return false };
        let read = checkpoint.read_tensor(one, offset, first).and_then(|()| checkpoint.read_tensor(other, offset, second));
        if read.is_err() || first != second {
            return false;
        }
        offset += length as u64;
    }
    true
}
