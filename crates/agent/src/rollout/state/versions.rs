//! Which versions lie in files next to the engine, and why each of them stays.
//!
//! Pure. Decides which files go: those that no engine holds, no update waits for and no group may go back to. Files that the engine may be
//! reading never go.

use std::sync::Arc;

use crate::archive::{Archive, Archived};
use weightsync_core::protocol::HeldVersion;

/// Versions in files. `F` are the files of one.
#[derive(Debug)]
pub(in crate::rollout) struct Versions<F> {
    /// What the engine was last switched to, where it lies in files.
    kept: Option<Arc<F>>,
    /// What it was switched to before, kept to go back.
    earlier: Archive<F>,
    /// Verified, and not installed yet.
    staged: Option<Arc<F>>,
    /// What the engine is being switched to, or holds half of: it must stay until the engine is switched again or put back.
    touched: Option<Arc<F>>,
    /// What the engine may hold, after an install that ended without proof.
    to_prove: Option<Arc<F>>,
}

impl<F> Default for Versions<F> {
    fn default() -> Self {
        Self { kept: None, earlier: Archive::default(), staged: None, touched: None, to_prove: None }
    }
}

impl<F: Archived> Versions<F> {
    /// All that lie here complete and verified.
    pub(in crate::rollout) fn all(&self) -> impl Iterator<Item = &Arc<F>> {
        self.kept.iter().chain(&self.staged).chain(self.earlier.all())
    }

    /// Those of them that the engine was switched to.
    pub(in crate::rollout) fn installed_once(&self) -> impl Iterator<Item = &Arc<F>> {
        self.kept.iter().chain(self.earlier.all())
    }

    pub(in crate::rollout) fn find(&self, wanted: &HeldVersion) -> Option<&Arc<F>> {
        self.all().find(|version| version.held().is(wanted))
    }

    pub(in crate::rollout) fn kept(&self) -> Option<&Arc<F>> {
        self.kept.as_ref()
    }

    pub(super) fn staged(&self) -> Option<&Arc<F>> {
        self.staged.as_ref()
    }

    /// Whether it is one that the engine was switched to before the last switch.
    pub(in crate::rollout) fn is_earlier(&self, wanted: &HeldVersion) -> bool {
        self.earlier.find(wanted).is_some()
    }

    pub(super) fn stage(&mut self, files: Option<F>) {
        self.staged = files.map(Arc::new);
    }

    /// Another version comes and needs room: what waits to be installed goes, what the engine was switched to stays to feed others.
    pub(in crate::rollout) fn unstage(&mut self) {
        self.staged = None;
    }

    /// A copy is damaged.
    pub(in crate::rollout) fn damaged(&mut self, version: &Arc<F>) {
        let other = |files: &Arc<F>| !Arc::ptr_eq(files, version);
        self.kept = self.kept.take().filter(other);
        self.staged = self.staged.take().filter(other);
        self.earlier.remove(version.held());
    }

    /// The engine is being switched to these files.
    pub(in crate::rollout) fn touch(&mut self, files: &Arc<F>) {
        self.touched = Some(files.clone());
    }

    /// The canary refused a version.
    pub(super) fn refused(&mut self, held: &HeldVersion) {
        self.staged = self.staged.take().filter(|staged| staged.held() != held);
        self.earlier.remove(held);
    }

    /// The engine holds a version whole, which lies in `files` or in none. What it held before stays by `keep` and `limit`; the rest is
    /// answered.
    pub(super) fn installed(&mut self, files: Option<&Arc<F>>, keep: u32, limit: u64) -> Vec<Arc<F>> {
        self.touched = None;
        self.staged = self.staged.take().filter(|staged| files.is_some_and(|files| !Arc::ptr_eq(staged, files)));
        self.keep(files, keep, limit)
    }

    /// The switch ended, and the engine holds what it held before.
    pub(super) fn untouched(&mut self) {
        self.touched = None;
    }

    /// The switch ended without a proof: the engine may hold these files.
    pub(super) fn unproven(&mut self, files: Option<&Arc<F>>) {
        self.to_prove = files.cloned();
    }

    /// It was found out later that the engine holds this version, or none. Of files that are kept for it, what goes is answered, as by
    /// [`installed`](Self::installed).
    pub(super) fn settled(&mut self, held: Option<&HeldVersion>, keep: u32, limit: u64) -> Vec<Arc<F>> {
        self.touched = None;
        match self.to_prove.take().filter(|files| Some(files.held()) == held) {
            Some(files) => self.keep(Some(&files), keep, limit),
            None => Vec::new(),
        }
    }

    /// The earlier version that was not used for longest goes, to make room; `current`, which the group is at, goes last.
    pub(in crate::rollout) fn make_room(&mut self, current: Option<&HeldVersion>) -> Option<Arc<F>> {
        if let Some(current) = current {
            self.earlier.touch(current);
        }
        self.earlier.make_room()
    }

    fn keep(&mut self, files: Option<&Arc<F>>, keep: u32, limit: u64) -> Vec<Arc<F>> {
        let before = std::mem::replace(&mut self.kept, files.cloned());
        if let Some(before) = before.filter(|before| files.is_none_or(|files| files.held() != before.held())) {
            self.earlier.put(before);
        }
        if let Some(files) = files {
            self.earlier.remove(files.held());
        }
        let most = usize::try_from(keep.max(1) - 1).unwrap_or(usize::MAX);
        self.earlier.trim(most, limit)
    }
}
