//! Which numbers may be published: they only grow, and one that failed, or whose outcome is not known, may come again with the very same
//! weights only.
//!
//! Pure. Skipped numbers are fine; nothing ever waits for one.

use std::collections::BTreeSet;

use weightsync_core::protocol::{HeldVersion, PublishError, PublishErrorCode, Version};
use weightsync_core::weights::DigestAlgorithm;

/// What was published through this agent, and what the group holds.
#[derive(Debug, Default)]
pub struct History {
    done: Option<HeldVersion>,
    /// The version that the group went back to, and the highest number that it held before.
    went_back: Option<(Version, Version)>,
    failed: Option<(Version, Option<String>)>,
    /// Versions that the group refused by its canary.
    refused: BTreeSet<Version>,
    /// How the manifest of the version that failed was computed.
    algorithm: Option<DigestAlgorithm>,
}

impl History {
    /// The last version that reached `minReady`, through this agent.
    pub fn done(&self) -> Option<&HeldVersion> {
        self.done.as_ref()
    }

    /// Whether a number may be published; answers the manifest that it must have, where it failed before.
    pub fn admit(&self, version: Version, current: Option<&HeldVersion>) -> Result<Option<String>, PublishError> {
        let held = self.done.iter().chain(current).map(|held| held.version).max();
        let failed = self.failed.as_ref().map(|(failed, _)| *failed);
        if self.refused.contains(&version) {
            let message = format!("the canary refused version {version}: give other weights a new number");
            let code = PublishErrorCode::VersionRefused;
            return Err(PublishError { code, message, retryable: false, phase: None, member: None });
        }
        let not_higher = |what: String| {
            Err(PublishError { code: PublishErrorCode::VersionNotHigher, message: what, retryable: false, phase: None, member: None })
        };
        if let Some((to, from)) = self.went_back.filter(|(to, from)| version <= *from && to < from) {
            return not_higher(format!(
                "version {version} is not higher than {from}, which the group held before it went back to {to}: give new weights a new number"
            ));
        }
        // A publish whose outcome was not heard may have reached the group: its weights may come again, and change nothing then.
        let tried = self.failed.as_ref().filter(|(failed, _)| *failed == version).and_then(|(_, manifest)| manifest.as_ref());
        let again = tried.is_some_and(|tried| {
            current.is_some_and(|current| current.version == version && (current.manifest.is_empty() || current.manifest == *tried))
        });
        if let Some(held) = held.filter(|held| version <= *held && !again) {
            return not_higher(format!(
                "version {version} is not higher than {held}, which the group holds: give new weights a new number"
            ));
        }
        if let Some(failed) = failed.filter(|failed| version < *failed) {
            return not_higher(format!(
                "version {version} is lower than {failed}, which was tried already: use {failed} again or a higher one"
            ));
        }
        Ok(self.failed.as_ref().filter(|(failed, _)| *failed == version).and_then(|(_, manifest)| manifest.clone()))
    }

    /// How the digests of a version's manifest are computed: as its way `asks`, until one try read all of it. Then another algorithm would make
    /// another manifest of the very same weights, which a member may hold. A try over NCCL that broke before that settles nothing: bytes that
    /// pass members need a digest that no member can forge.
    pub fn algorithm(&self, version: Version, asks: DigestAlgorithm) -> DigestAlgorithm {
        let settled = self.failed.as_ref().is_some_and(|(failed, manifest)| *failed == version && manifest.is_some());
        self.algorithm.filter(|_| settled).unwrap_or(asks)
    }

    /// The group went back to a version, from numbers up to `from`. What was published here since counts all the same.
    pub fn went_back(&mut self, to: &HeldVersion, from: Version) {
        if self.done.as_ref().is_none_or(|done| done.version <= from) {
            self.done = Some(to.clone());
        }
        if self.went_back.is_none_or(|(_, before)| before <= from) {
            self.went_back = Some((to.version, from));
        }
    }

    /// The group refused a version by its canary.
    pub fn refused(&mut self, version: Version) {
        self.refused.insert(version);
    }

    pub fn tried(&mut self, version: Version) {
        if self.failed.as_ref().is_none_or(|(failed, _)| *failed != version) {
            self.failed = Some((version, None));
        }
    }

    /// The whole stream of the version was read, and this is what it was.
    pub fn read(&mut self, held: &HeldVersion, algorithm: DigestAlgorithm) {
        self.algorithm = Some(algorithm);
        self.failed = Some((held.version, Some(held.manifest.clone())));
    }

    /// The version reached `minReady`.
    pub fn reached(&mut self, held: HeldVersion) {
        self.failed = None;
        self.done = Some(held);
    }
}
