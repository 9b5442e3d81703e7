//! The index of a sharded checkpoint: the file of each tensor (transformers: `model.safetensors.index.json`).
//!
//! Decides whether an index is valid. A file name in it must be a plain name in the checkpoint's own directory: an index must not lead to
//! other files of the machine.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::SafetensorsError;
use crate::weights::shown;

/// Longest index that is read, in bytes.
pub const MAX_INDEX_BYTES: u64 = 100_000_000;

#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// Pairs in their order. Duplicates are kept, so that they can be refused.
struct WeightMap(Vec<(String, String)>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names by tensor name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.try_reserve(1).map_err(|_| A::Error::custom("out of memory"))?;
                    pairs.push(pair);
                }
                Ok(WeightMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Reads an index: the file of each tensor, by tensor name. `file` is the index's own name, for errors.
pub fn parse_index(file: &str, json: &[u8]) -> Result<BTreeMap<String, String>, SafetensorsError> {
    let index: Index = serde_json::from_slice(json).map_err(|error| {
        let place = format!("line {} column {}", error.line(), error.column());
        SafetensorsError::file(file, format!("not an index: an object with weight_map is wanted, something else stands at {place}"))
    })?;
    let mut files = BTreeMap::new();
    for (tensor, shard) in index.weight_map.0 {
        if !is_plain_name(&shard) {
            let what = format!("its file {} is not a plain *.safetensors file name", shown(&shard));
            return Err(SafetensorsError::tensor(file, &tensor, what));
        }
        if let Some(other) = files.insert(tensor.clone(), shard) {
            return Err(SafetensorsError::tensor(file, &tensor, format!("appears twice, once in {}", shown(&other))));
        }
    }
    Ok(files)
}

fn is_plain_name(name: &str) -> bool {
    let stem = name.strip_suffix(".safetensors").unwrap_or_default();
    !stem.is_empty() && name.len() <= 255 && !name.contains(['/', '\\', '\0'])
}
