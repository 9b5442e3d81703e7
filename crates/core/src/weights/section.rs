//! The model to which a tensor belongs: the one that answers, or its draft model.
//!
//! A version may contain both. They are one stream and one manifest, so neither is served without the other's bytes. But engines load them
//! in two sessions, and a separate draft model may use the same tensor names. Decides the order of the two in a stream, and one unique name
//! for each tensor in files and errors.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{Bucket, Layout, TensorSpec};

/// A part of a version that an engine loads into one of its models.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Section {
    /// The model that answers.
    #[default]
    Model,
    /// The model that drafts tokens for it (speculative decoding): EAGLE, MTP, or a small model.
    Draft,
}

impl Section {
    /// Its name in a manifest and on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Draft => "draft",
        }
    }

    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub(super) fn is_model(&self) -> bool {
        *self == Self::Model
    }
}

impl TensorSpec {
    /// The unique name in a version: `draft/NAME` for a tensor of the draft model.
    pub fn full_name(&self) -> Cow<'_, str> {
        match self.section {
            Section::Model => Cow::Borrowed(&self.name),
            Section::Draft => Cow::Owned(format!("{}/{}", Section::Draft.name(), self.name)),
        }
    }
}

impl Layout {
    /// Whether a part of the version is for a draft model.
    pub fn has_draft(&self) -> bool {
        // They come last.
        self.entries.last().is_some_and(|entry| entry.tensor.section == Section::Draft)
    }

    /// The model of a bucket, if the stream is cut between tensors: no bucket holds tensors of both.
    pub fn section(&self, bucket: &Bucket) -> Section {
        self.parts(bucket.offset, bucket.bytes).next().map_or(Section::Model, |part| part.entry.tensor.section)
    }
}
