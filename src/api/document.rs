//! Reads a `WeightSync` from a document of a file, which no API server has checked.

use serde_json::Value;

use super::{GROUP, VERSION, WeightSync, schema, unknown_fields};

/// Why a document is no `WeightSync`.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    #[error("a {kind} has the apiVersion {GROUP}/{VERSION}, not {found:?}")]
    Version { kind: &'static str, found: String },
    #[error("the WeightSync cannot be read")]
    Object(#[source] serde_path_to_error::Error<serde_json::Error>),
    #[error("the schema cannot be made")]
    Schema(#[source] serde_json::Error),
}

/// The object, and the fields of the document that the API does not have. Its rules are not checked: [`validate`](super::validate) does.
pub fn read_document(document: &Value) -> Result<(WeightSync, Vec<String>), DocumentError> {
    check_version("WeightSync", document)?;
    let object = serde_path_to_error::deserialize(document).map_err(DocumentError::Object)?;
    Ok((object, unknown_fields(&schema().map_err(DocumentError::Schema)?, document)))
}

/// Whether a document has the version of this API.
pub fn check_version(kind: &'static str, document: &Value) -> Result<(), DocumentError> {
    let found = document.get("apiVersion").and_then(Value::as_str).unwrap_or_default();
    if found == format!("{GROUP}/{VERSION}") { Ok(()) } else { Err(DocumentError::Version { kind, found: found.to_owned() }) }
}
