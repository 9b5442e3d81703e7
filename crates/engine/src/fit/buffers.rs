//! Tensors that a model computes for itself: engines skip those that a file has.
//!
//! Decides by name and shape. It never names a tensor that is trained.

/// Rotary tables, by the names that vLLM's loader drops for every model (`REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER`): neither a file nor a version
/// needs them, and neither is wrong with them.
pub(super) fn is_rotary(name: &str) -> bool {
    let (before, last) = name.rsplit_once('.').unwrap_or(("", name));
    let of_rotary = before.rsplit('.').next().is_some_and(|part| part.contains("rotary") || part.contains("rope"));
    last == "inv_freq" || of_rotary && matches!(last, "original_inv_freq" | "cos_cached" | "sin_cached" | "cos_sin_cache")
}

/// Further buffers that old files hold and new models compute: numbers of positions, and masks of GPT-2 and GPT-NeoX. A file needs no match
/// for them. An engine may refuse them, so a version must not bring what its file lacks.
pub(super) fn is_buffer(name: &str, shape: &[u64]) -> bool {
    let (before, last) = name.rsplit_once('.').unwrap_or(("", name));
    let of_attention = before.rsplit('.').next().is_some_and(|part| matches!(part, "attn" | "attention" | "self_attn"));
    let is_mask = matches!(shape, [1, 1, rows, columns] if rows == columns);
    is_rotary(name) || last == "position_ids" || of_attention && (last == "masked_bias" || last == "bias" && is_mask)
}
