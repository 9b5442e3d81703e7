//! Sizes and speeds as people write them: `16GB`, `64MiB`, `25Gbit`, `3GB/s`. Whole numbers or one with a decimal point.

use weightsync_core::plan::Bandwidth;

const BYTES: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

const BITS: [(&str, u64); 4] = [("Kbit", 1_000), ("Mbit", 1_000_000), ("Gbit", 1_000_000_000), ("Tbit", 1_000_000_000_000)];

pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    scaled(text, &BYTES).ok_or_else(|| format!("{text:?} is not a size such as 16GB or 512MiB"))
}

/// A speed in bytes or bits a second.
pub(super) fn parse_rate(text: &str) -> Result<Bandwidth, String> {
    let number = text.strip_suffix("/s").unwrap_or(text);
    let bytes = scaled(number, &BYTES).or_else(|| scaled(number, &BITS).map(|bits| bits / 8));
    match bytes {
        Some(bytes_per_second) if bytes_per_second > 0 => Ok(Bandwidth { name: text.to_owned(), bytes_per_second }),
        _ => Err(format!("{text:?} is not a speed such as 25Gbit or 3GB/s")),
    }
}

fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let (number, unit) = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?.trim_end(), *unit)))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if !whole.chars().chain(fraction.chars()).all(|digit| digit.is_ascii_digit()) || whole.is_empty() || !(1..=9).contains(&fraction.len())
    {
        return None;
    }
    let tenths = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let number = whole.parse::<u64>().ok().map(u128::from)? * tenths + fraction.parse::<u128>().ok()?;
    u64::try_from(number * u128::from(unit) / tenths).ok()
}

/// Microseconds as text, rounded up.
pub(super) fn show_micros(micros: u64) -> String {
    match micros {
        0..1_000 => format!("{micros} µs"),
        1_000..10_000_000 => format!("{} ms", micros.div_ceil(1_000)),
        _ => {
            let tenths = micros.div_ceil(100_000);
            format!("{}.{} s", tenths / 10, tenths % 10)
        }
    }
}
