//! The header of one safetensors file: its tensors and their places.
//!
//! Decides whether a header is valid, by the rules of the format (safetensors 0.7, `tensor.rs`: `Metadata::validate`). Ranges are end to
//! end from 0 to the end of the file, each with the length of its type and shape, and no name occurs twice. Memory grows only with the
//! header's length, which the caller compared with the file's.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::SafetensorsError;
use crate::weights::dtype::SizeError;
use crate::weights::{Dtype, shown};

/// Longest header in bytes (safetensors 0.7: `MAX_HEADER_SIZE`).
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, in elements; empty for a scalar.
    pub shape: Vec<u64>,
    /// First byte, counted from the first byte after the header.
    pub begin: u64,
    /// First byte after it, counted likewise.
    pub end: u64,
}

/// A valid header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Tensors in the order of the file; empty ones at one place by name.
    pub tensors: Vec<HeaderTensor>,
    /// Free text from the writer; `format` is `pt` for PyTorch.
    pub metadata: BTreeMap<String, String>,
}

/// Reads the length of the header from the first 8 bytes of a file of `file_bytes` bytes, and checks it.
pub fn header_length(file: &str, first: [u8; 8], file_bytes: u64) -> Result<u64, SafetensorsError> {
    let length = u64::from_le_bytes(first);
    if length > MAX_HEADER_BYTES {
        return Err(SafetensorsError::file(
            file,
            format!("not safetensors: its header would be {length} bytes, at most {MAX_HEADER_BYTES} are allowed"),
        ));
    }
    match file_bytes.checked_sub(8) {
        Some(rest) if length <= rest => Ok(length),
        _ => Err(SafetensorsError::file(file, format!("cut short: a header of {length} bytes in a file of {file_bytes} bytes"))),
    }
}

/// Reads a header of a file that holds `data_bytes` bytes after it. `file` is the file's name, for errors.
pub fn parse_header(file: &str, json: &[u8], data_bytes: u64) -> Result<Header, SafetensorsError> {
    if json.first() != Some(&b'{') {
        return Err(SafetensorsError::file(file, "not safetensors: the header does not start with `{`"));
    }
    let mut found = Found::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    if let Err(error) = found.deserialize(&mut reader).and_then(|()| reader.end()) {
        // The parser's message may quote the file; its place and kind do not.
        let place = format!("line {} column {}", error.line(), error.column());
        return Err(match found.at {
            Some(tensor) => SafetensorsError::tensor(
                file,
                &tensor,
                format!("dtype, shape and data_offsets (two numbers) are wanted, something else stands at {place} of the header"),
            ),
            None => SafetensorsError::file(file, format!("the header is not the JSON object that safetensors wants, at {place}")),
        });
    }
    check(file, found, data_bytes)
}

fn check(file: &str, found: Found, data_bytes: u64) -> Result<Header, SafetensorsError> {
    let mut names = HashSet::new();
    for (name, _) in &found.tensors {
        if !names.insert(name.as_str()) {
            return Err(SafetensorsError::tensor(file, name, "appears twice in the header"));
        }
    }
    if found.metadata_twice {
        return Err(SafetensorsError::file(file, "__metadata__ appears twice in the header"));
    }
    let mut tensors = Vec::with_capacity(found.tensors.len());
    for (name, said) in found.tensors {
        let fail = |what: String| Err(SafetensorsError::tensor(file, &name, what));
        let Some(dtype) = Dtype::from_name(&said.dtype) else {
            return fail(format!("its type {} is unknown", shown(&said.dtype)));
        };
        let (begin, end) = said.data_offsets;
        let wanted = match dtype.tensor_bytes(&said.shape) {
            Ok(bytes) => bytes,
            Err(SizeError::TooLarge) => return fail("its size does not fit 64 bits".into()),
            Err(SizeError::PartialByte(bits)) => return fail(format!("{bits} bits do not fill whole bytes")),
        };
        match end.checked_sub(begin) {
            None => return fail(format!("it ends at {end}, before it begins at {begin}")),
            Some(bytes) if bytes != wanted => {
                return fail(format!("its place holds {bytes} bytes, its type and shape need {wanted}"));
            }
            Some(_) if end > data_bytes => {
                return fail(format!("it ends at {end}, the file holds {data_bytes} bytes of tensors: cut short"));
            }
            Some(_) => tensors.push(HeaderTensor { name, dtype, shape: said.shape, begin, end }),
        }
    }
    tensors.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let mut place = 0;
    for tensor in &tensors {
        if tensor.begin < place {
            return Err(SafetensorsError::tensor(file, &tensor.name, format!("it begins at {}, inside another tensor", tensor.begin)));
        }
        if tensor.begin > place {
            let what = format!("it begins at {}, {} bytes before it belong to no tensor", tensor.begin, tensor.begin - place);
            return Err(SafetensorsError::tensor(file, &tensor.name, what));
        }
        place = tensor.end;
    }
    if place != data_bytes {
        let what = format!("{} bytes after the last tensor belong to none", data_bytes.saturating_sub(place));
        return Err(SafetensorsError::file(file, what));
    }
    Ok(Header { tensors, metadata: found.metadata })
}

/// One tensor's object in the header, unchecked.
#[derive(Deserialize)]
struct Said {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// All entries of a header, in its order. A map would silently drop one of two equal names.
#[derive(Default)]
struct Found {
    tensors: Vec<(String, Said)>,
    metadata: BTreeMap<String, String>,
    metadata_seen: bool,
    metadata_twice: bool,
    /// The tensor being read, for errors.
    at: Option<String>,
}

impl<'de> DeserializeSeed<'de> for &mut Found {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Found {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if std::mem::replace(&mut self.metadata_seen, true) {
                    self.metadata_twice = true;
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
                self.metadata = map.next_value()?;
                continue;
            }
            self.at = Some(name.clone());
            let said: Said = map.next_value()?;
            self.at = None;
            self.tensors.try_reserve(1).map_err(|_| A::Error::custom("out of memory"))?;
            self.tensors.push((name, said));
        }
        Ok(())
    }
}
