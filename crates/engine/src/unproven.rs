//! Routes into an engine that were read in its source and tested with simulators, but did not run on a GPU yet.
//!
//! Decides that such a route is refused for every version whose source was not read. For the others it is refused unless a run on GPUs
//! proved that version, or the user of the agent accepts the risk ([`super::EngineConfig::unproven_routes`],
//! `WEIGHTSYNC_UNPROVEN_ROUTES=1`). Pure.

/// A route, and the versions whose source describes its use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unproven {
    pub(super) engine: &'static str,
    pub(super) way: &'static str,
    /// Versions that ran on a GPU.
    pub(super) seen: &'static [&'static str],
    /// Other versions whose source was read.
    pub(super) read: &'static [&'static str],
}

impl Unproven {
    pub(super) fn allowed(self, version: &str, wanted: bool) -> Result<(), String> {
        let Self { engine, way, seen, read } = self;
        if seen.contains(&version) {
            return Ok(());
        }
        if !read.contains(&version) {
            return Err(format!("{way} of {engine} {version} is not known, only that of {}", [seen, read].concat().join(" and ")));
        }
        if !wanted {
            return Err(format!(
                "{way} of {engine} {version} was never seen on a GPU (WEIGHTSYNC_UNPROVEN_ROUTES=1 in the agent's environment allows it all the same)"
            ));
        }
        Ok(())
    }
}
