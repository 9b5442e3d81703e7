//! An API key for requests to an engine. Decides how it is read and that it is never printed.

use std::fmt;
use std::path::Path;

use super::EngineError;

/// An API key. Its text appears in requests only, never in logs or errors.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// A key from text without surrounding white space, because files and environments often end in a line break.
    pub fn new(text: &str) -> Result<Self, EngineError> {
        let text = text.trim();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(EngineError::Unsupported {
                what: "the engine's API key is empty or has characters that an HTTP header cannot carry".into(),
                next_step: "store the key itself, as plain ASCII text without spaces, in the secret".into(),
            });
        }
        Ok(Self(text.to_owned()))
    }

    /// Reads the key from an environment variable; `None` if it is not set.
    pub fn from_env(name: &str) -> Result<Option<Self>, EngineError> {
        match std::env::var_os(name) {
            None => Ok(None),
            Some(text) => Self::new(&text.to_string_lossy()).map(Some),
        }
    }

    /// Reads the key from a file, such as a mounted secret.
    pub fn from_file(path: &Path) -> Result<Self, EngineError> {
        let text = std::fs::read_to_string(path).map_err(|cause| EngineError::Unsupported {
            what: format!("the engine's API key cannot be read from {}: {cause}", path.display()),
            next_step: "mount the secret that holds the key at this path".into(),
        })?;
        Self::new(&text)
    }

    /// The key itself, for the header of a request.
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(...)")
    }
}
