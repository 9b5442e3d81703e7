//! Whether a rollout's pod may serve.
//!
//! Pure. Ready means: the engine's present start exists at this moment, and confirmed a version that was verified in full, or no version is
//! required. Unknown, partial, stale and outdated mean not ready, each with its reason.

use super::machine::Installed;
use weightsync_core::protocol::{HeldVersion, Returned, Skew, Version, skew};
use weightsync_core::weights::IgnoredTensors;
use weightsync_engine::EngineStart;

/// The controller's assignment for this rollout; nothing is known before the first one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assigned {
    pub known: bool,
    pub serve_before_first_version: bool,
    /// Whether the object is suspended: its pods serve what they have.
    pub suspended: bool,
    /// The version that every rollout should hold.
    pub current: Option<HeldVersion>,
    /// Set once the group went back to an earlier version.
    pub returned: Option<Returned>,
    /// The newest version in service, where the object limits how far versions may be apart.
    pub newest: Option<Version>,
    /// Tensors that a version is not compared by.
    pub ignored: IgnoredTensors,
}

#[derive(Debug)]
pub struct Seen<'a> {
    pub assigned: &'a Assigned,
    pub released: bool,
    /// The version that every rollout should hold, by the latest word.
    pub current: Option<&'a HeldVersion>,
    /// What the engine was last switched to, in whatever start.
    pub last: Option<&'a HeldVersion>,
    pub installed: Option<&'a Installed>,
    pub max_skew: Option<Version>,
    /// Whether the group goes back from what the engine confirmed: until enough were taken back, both versions are in service.
    pub left: bool,
    /// Why it may hold a mixture.
    pub dirty: Option<&'a str>,
    /// Why it is not known what it holds, or whether it runs.
    pub unproven: Option<&'a str>,
    /// The version that lies here complete and whose turn to be switched to comes: until then the engine serves what it has.
    pub awaits: Option<&'a HeldVersion>,
    /// Whether the engine is being switched by us: it may not answer then.
    pub switching: bool,
    pub start: Option<&'a EngineStart>,
    /// Whether the engine's process is known to be that start now, and not when it was last asked.
    pub certain: bool,
    pub unhealthy: bool,
}

/// `Ok` when the pod may serve, else why not.
pub fn ready(seen: &Seen<'_>) -> Result<(), String> {
    if let Some(reason) = seen.dirty {
        return Err(format!("the engine must not serve before it is fed in full ({reason})"));
    }
    if let Some(reason) = seen.unproven {
        return Err(format!("it is not known what the engine holds ({reason}); its agent asks it"));
    }
    if !seen.certain {
        return Err("the engine's process is gone or was replaced since it answered: what it serves is not known".into());
    }
    if seen.unhealthy && !seen.switching {
        return Err("the engine does not pass its health probes".into());
    }
    if seen.released || seen.assigned.suspended {
        return Ok(());
    }
    match (seen.installed, seen.current) {
        (Some(installed), _) if seen.start != Some(&installed.start) => Err("the engine started again and holds no version yet".into()),
        (Some(installed), Some(current)) if seen.max_skew.is_some() && !seen.left && installed.held.version != current.version => {
            let newest = seen.assigned.newest.unwrap_or(current.version).max(current.version);
            let (number, most) = (installed.held.version, seen.max_skew.unwrap_or_default());
            match skew(most, current.version, newest, number) {
                // An agent is not reported the moment at which its version counts: waiting for that word here would empty the service.
                Skew::Within | Skew::TooNew => Ok(()),
                Skew::TooOld => {
                    Err(format!("the engine holds version {number}, the newest in service is {newest}: more than {most} apart"))
                }
            }
        }
        (Some(installed), Some(current))
            if installed.held.version < current.version && !seen.awaits.is_some_and(|held| held.is(current)) =>
        {
            Err(format!("the engine holds version {}, the group is at {}", installed.held.version, current.version))
        }
        (Some(installed), Some(current)) if installed.held.version == current.version && !installed.held.is(current) => {
            Err(format!("the engine holds other weights under the number {} than the group", current.version))
        }
        (Some(installed), _) => match seen.assigned.returned.filter(|returned| returned.left(installed.held.version)) {
            Some(returned) => Err(format!("the engine holds version {}, the group went back to {}", installed.held.version, returned.to)),
            None => Ok(()),
        },
        (None, Some(current)) => Err(format!("the engine does not hold version {} yet", current.version)),
        (None, None) if seen.last.is_some() => Err("the engine started again and holds no version yet".into()),
        (None, None) if !seen.assigned.known => Err("the controller has not said yet whether there is a version".into()),
        (None, None) if !seen.assigned.serve_before_first_version => Err("there is no version yet".into()),
        (None, None) => Ok(()),
    }
}
