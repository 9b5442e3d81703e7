//! Text that comes in and goes out of commands: a file or standard input, and tables for people.
//!
//! It knows nothing of what the text says.

use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;

/// Text of a file, or of standard input where the path is `-`, as `kubectl` reads it.
pub fn read(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("standard input cannot be read")?;
        return Ok(text);
    }
    std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))
}

/// One line a row, with columns as wide as their widest cell and no space at the end of a line.
pub fn columns<R: AsRef<[String]>>(rows: &[R]) -> Vec<String> {
    let cells = || rows.iter().map(AsRef::as_ref);
    let count = cells().map(<[String]>::len).max().unwrap_or(0);
    let width = |column: usize| cells().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let line = |row: &[String]| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        cells.join("  ").trim_end().to_owned()
    };
    cells().map(line).collect()
}
