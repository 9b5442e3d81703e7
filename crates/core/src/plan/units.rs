//! Sizes as text.

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Bytes as text, rounded up to a tenth so that a need is not understated: `1.5 GiB`.
pub fn show_bytes(bytes: u64) -> String {
    shown(bytes, u128::div_ceil)
}

/// Bytes as text, rounded down to a tenth so that free memory is not overstated.
pub fn show_free(bytes: u64) -> String {
    shown(bytes, |tenths, unit| tenths / unit)
}

fn shown(bytes: u64, divide: fn(u128, u128) -> u128) -> String {
    let Some((name, unit)) = UNITS.into_iter().find(|(_, unit)| bytes >= *unit) else { return format!("{bytes} B") };
    let tenths = divide(u128::from(bytes) * 10, u128::from(unit));
    if tenths.is_multiple_of(10) { format!("{} {name}", tenths / 10) } else { format!("{}.{} {name}", tenths / 10, tenths % 10) }
}
