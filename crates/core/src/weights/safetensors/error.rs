//! Errors of checkpoints. Every message names the file and any tensor at fault; none shows contents.

use std::io;

/// Why a checkpoint cannot be read or written. Names from outside are shortened and stripped of control characters.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SafetensorsError {
    #[error("{file}: {source}")]
    Io { file: String, source: io::Error },
    #[error("{file}: {what}")]
    File { file: String, what: String },
    #[error("{file}: tensor {tensor}: {what}")]
    Tensor { file: String, tensor: String, what: String },
    #[error("{file}: tensor {tensor} cannot be read: {source}")]
    TensorIo { file: String, tensor: String, source: io::Error },
}

impl SafetensorsError {
    pub(super) fn file(file: &str, what: impl Into<String>) -> Self {
        Self::File { file: file.to_owned(), what: what.into() }
    }

    pub(super) fn tensor(file: &str, tensor: &str, what: impl Into<String>) -> Self {
        Self::Tensor { file: file.to_owned(), tensor: super::super::shown(tensor), what: what.into() }
    }

    pub(super) fn io(file: &str, source: io::Error) -> Self {
        Self::Io { file: file.to_owned(), source }
    }
}
