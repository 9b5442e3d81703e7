//! The blake3 of a tensor from values of its blocks, so that several cores can hash one tensor while it still arrives.
//!
//! Decides how a tensor is cut into blocks and how their values become its digest: that of `b3sum`, cut to 128 bits. Pure; it never keeps
//! bytes.

use blake3::hazmat::{ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root};

/// Length in bytes of a tensor's blocks; the last one may be shorter. A power of two, as subtrees of blake3 are.
pub const TREE_BLOCK: usize = 1 << 20;

/// The first 128 bits of a blake3. For a member that passes bytes on, another tensor with the same ones is as hard to find as a key of 128
/// bits. It does not protect from a trainer that chooses both tensors: a trainer is trusted.
pub(super) fn first_half(hash: &blake3::Hash) -> u128 {
    let mut half = [0; 16];
    for (to, from) in half.iter_mut().zip(hash.as_bytes()) {
        *to = *from;
    }
    u128::from_be_bytes(half)
}

/// The contribution of one block to a tensor's digest.
#[derive(Clone, Copy)]
pub struct BlockValue(Value);

#[derive(Clone, Copy)]
enum Value {
    /// Of the only block.
    Root(u128),
    /// Of one of several blocks.
    Subtree(ChainingValue),
}

impl BlockValue {
    /// The value of block `number` of a tensor of so many bytes. Blocks of another length than [`block_bytes`] give another digest.
    pub fn of(tensor_bytes: u64, number: u64, block: &[u8]) -> Self {
        if tensor_bytes <= TREE_BLOCK as u64 || block.is_empty() || block.len() > TREE_BLOCK {
            return Self(Value::Root(first_half(&blake3::hash(block))));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(number.saturating_mul(TREE_BLOCK as u64));
        hasher.update(block);
        Self(Value::Subtree(hasher.finalize_non_root()))
    }
}

/// Length of block `number` of a tensor of so many bytes; 0 beyond its end.
pub fn block_bytes(tensor_bytes: u64, number: u64) -> u64 {
    tensor_bytes.saturating_sub(number.saturating_mul(TREE_BLOCK as u64)).min(TREE_BLOCK as u64)
}

/// The digest of a tensor from the values of all its blocks, in order; `None` if they do not form one tensor.
pub fn tree_digest(values: &[BlockValue]) -> Option<u128> {
    if let [BlockValue(Value::Root(digest))] = values {
        return Some(*digest);
    }
    let (left, right) = halves(values)?;
    Some(first_half(&merge_subtrees_root(&merged(left)?, &merged(right)?, Mode::Hash)))
}

fn merged(values: &[BlockValue]) -> Option<ChainingValue> {
    if let [BlockValue(Value::Subtree(value))] = values {
        return Some(*value);
    }
    let (left, right) = halves(values)?;
    Some(merge_subtrees_non_root(&merged(left)?, &merged(right)?, Mode::Hash))
}

/// The left half of a tree is the largest complete one that leaves something to the right.
fn halves(values: &[BlockValue]) -> Option<(&[BlockValue], &[BlockValue])> {
    if values.len() < 2 {
        return None;
    }
    values.split_at_checked(values.len().div_ceil(2).next_power_of_two())
}
