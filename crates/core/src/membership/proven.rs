//! Which versions exist: those that a source announced, and the one in status. A claim about any other has no effect.
//!
//! Of two statements about one number the one of the later epoch counts: a new source may reuse a number that never counted. The
//! coordinator checks whether a statement is genuine.

use std::collections::BTreeMap;

use crate::protocol::{Announced, HeldVersion, Version};

use super::{EPOCHS_AHEAD, Membership};

/// Numbers that are remembered; of more, the lowest are forgotten.
const REMEMBERED: usize = 1024;

/// By number, the epoch and the manifest of the latest statement.
#[derive(Debug, Clone, Default)]
pub(super) struct Proven(BTreeMap<Version, (u64, String)>);

impl Proven {
    fn learn(&mut self, announced: Announced) {
        let Announced { version, epoch, manifest } = announced;
        let latest = self.0.entry(version).or_default();
        if (epoch, &manifest) > (latest.0, &latest.1) {
            *latest = (epoch, manifest);
        }
        while self.0.len() > REMEMBERED {
            self.0.pop_first();
        }
    }

    fn names(&self, held: &HeldVersion) -> bool {
        self.manifest(held.version).is_some_and(|manifest| *manifest == held.manifest)
    }

    fn manifest(&self, version: Version) -> Option<&String> {
        self.0.get(&version).map(|(_, manifest)| manifest)
    }
}

impl Membership {
    /// Records a checked statement of a source. One of an epoch that no controller can have written is ignored.
    pub(super) fn note_announced(&mut self, announced: Announced) {
        if announced.epoch <= self.written.saturating_add(EPOCHS_AHEAD) {
            self.proven.learn(announced);
        }
        // Status may hold the number alone.
        if let Some(current) = self.version.as_mut().filter(|current| current.manifest.is_empty())
            && let Some(manifest) = self.proven.manifest(current.version)
        {
            current.manifest.clone_from(manifest);
        }
    }

    /// Whether a version exists, with these weights.
    pub(super) fn exists(&self, held: &HeldVersion) -> bool {
        self.version.as_ref() == Some(held) || self.proven.names(held)
    }
}
