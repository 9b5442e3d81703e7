//! Safetensors files that are written as the stream arrives: their headers, and the place of each part of the stream.
//!
//! Decides names, headers and places from a layout alone. So a receiver writes every part at its final place, and the files are complete
//! when the stream is. Tensors of a file are sorted by falling element size, like safetensors' own writer does, so that each is aligned.
//! Tensors of a draft model have their full names. It never opens a file.

use std::fmt::Write as _;

use super::{INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, SafetensorsError};
use crate::weights::{Entry, Layout};

/// Tensors start at a multiple of this in the file, so that they are aligned in a mapped file.
const DATA_ALIGNMENT: usize = 64;

/// A file to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Name within the directory.
    pub name: String,
    /// Its first bytes: length and header.
    pub header: Vec<u8>,
    /// Length of the whole file.
    pub bytes: u64,
}

/// The place of a part of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Position in [`SafetensorsPlan::files`].
    pub file: usize,
    /// First byte in that file.
    pub file_offset: u64,
    /// First byte in the requested part.
    pub in_part: u64,
    /// Length in bytes, at least 1.
    pub bytes: u64,
}

/// Files of a version, and the mapping from stream to files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SafetensorsPlan {
    /// Files with tensors, in order.
    pub files: Vec<PlannedFile>,
    /// Name and contents of the index, if there is more than one file.
    pub index: Option<(String, Vec<u8>)>,
    /// File and file offset of each tensor, in layout order.
    places: Vec<(usize, u64)>,
}

impl SafetensorsPlan {
    /// Plans one file, or with `shard_bytes` files of at most so many bytes of tensors (a larger tensor has a file of its own).
    pub fn new(layout: &Layout, shard_bytes: Option<u64>) -> Result<Self, SafetensorsError> {
        let shards = cut(layout, shard_bytes.unwrap_or(u64::MAX));
        let count = shards.len();
        let mut plan = Self { files: Vec::with_capacity(count), index: None, places: vec![(0, 0); layout.entries.len()] };
        for (number, shard) in shards.iter().enumerate() {
            let name = if count == 1 { SINGLE_FILE.to_owned() } else { format!("model-{:05}-of-{count:05}.safetensors", number + 1) };
            let file = plan.add(number, name, shard)?;
            plan.files.push(file);
        }
        if count > 1 {
            plan.index = Some((INDEX_FILE.to_owned(), index(layout, &plan)?));
        }
        Ok(plan)
    }

    /// The places of `bytes` bytes from `offset` on of the stream of `layout` (the planned one). Gaps of the stream have none.
    pub fn segments<'a>(&'a self, layout: &'a Layout, offset: u64, bytes: u64) -> impl Iterator<Item = Segment> + 'a {
        layout.parts(offset, bytes).filter_map(|part| {
            let (file, start) = self.places.get(part.index)?;
            Some(Segment { file: *file, file_offset: start.checked_add(part.in_tensor)?, in_part: part.in_range, bytes: part.bytes })
        })
    }

    /// Bytes of all files, including the index: the space that the directory needs.
    pub fn total_bytes(&self) -> u64 {
        let index = self.index.as_ref().map_or(0, |(_, json)| json.len() as u64);
        self.files.iter().fold(index, |sum, file| sum.saturating_add(file.bytes))
    }

    fn add(&mut self, number: usize, name: String, shard: &[(usize, &Entry)]) -> Result<PlannedFile, SafetensorsError> {
        let mut ordered = shard.to_vec();
        ordered.sort_by_key(|(index, entry)| (std::cmp::Reverse(entry.tensor.dtype.bits()), *index));
        let mut header = String::from(r#"{"__metadata__":{"format":"pt"}"#);
        let mut end = 0u64;
        for (_, entry) in &ordered {
            let begin = end;
            end = end.saturating_add(entry.bytes);
            write_tensor(&mut header, entry, begin, end)
                .map_err(|_| SafetensorsError::tensor(&name, &entry.tensor.full_name(), "cannot be described in a header"))?;
        }
        header.push('}');
        while !(header.len() + 8).is_multiple_of(DATA_ALIGNMENT) {
            header.push(' ');
        }
        let length = header.len() as u64;
        if length > MAX_HEADER_BYTES {
            let what = format!("its header would be {length} bytes, at most {MAX_HEADER_BYTES} are allowed: choose smaller shards");
            return Err(SafetensorsError::file(&name, what));
        }
        let mut place = length + 8;
        for (index, entry) in &ordered {
            if let Some(slot) = self.places.get_mut(*index) {
                *slot = (number, place);
            }
            place = place.saturating_add(entry.bytes);
        }
        let mut first = length.to_le_bytes().to_vec();
        first.extend_from_slice(header.as_bytes());
        Ok(PlannedFile { name, header: first, bytes: place })
    }
}

/// Tensors of each file: in layout order, as many as fit.
fn cut(layout: &Layout, shard_bytes: u64) -> Vec<Vec<(usize, &Entry)>> {
    let mut shards = vec![Vec::new()];
    let mut held = 0u64;
    for (index, entry) in layout.entries.iter().enumerate() {
        if held > 0 && held.saturating_add(entry.bytes) > shard_bytes {
            shards.push(Vec::new());
            held = 0;
        }
        held = held.saturating_add(entry.bytes);
        if let Some(shard) = shards.last_mut() {
            shard.push((index, entry));
        }
    }
    shards
}

fn write_tensor(header: &mut String, entry: &Entry, begin: u64, end: u64) -> Result<(), std::fmt::Error> {
    let name = serde_json::to_string(&entry.tensor.full_name()).map_err(|_| std::fmt::Error)?;
    write!(header, r#",{name}:{{"dtype":"{}","shape":["#, entry.tensor.dtype.name())?;
    for (position, size) in entry.tensor.shape.iter().enumerate() {
        let comma = if position == 0 { "" } else { "," };
        write!(header, "{comma}{size}")?;
    }
    write!(header, r#"],"data_offsets":[{begin},{end}]}}"#)
}

fn index(layout: &Layout, plan: &SafetensorsPlan) -> Result<Vec<u8>, SafetensorsError> {
    let files = layout.tensors().zip(&plan.places).filter_map(|(tensor, (file, _))| {
        let file = plan.files.get(*file)?;
        Some((tensor.full_name().into_owned(), serde_json::Value::String(file.name.clone())))
    });
    let weight_map: serde_json::Map<_, _> = files.collect();
    let size: u64 = layout.entries.iter().map(|entry| entry.bytes).sum();
    let index = serde_json::json!({"metadata": {"total_size": size}, "weight_map": weight_map});
    serde_json::to_vec_pretty(&index).map_err(|error| SafetensorsError::file(INDEX_FILE, error.to_string()))
}
