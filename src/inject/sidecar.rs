//! The agent as a native sidecar: resources, logs and restarts of its own, and the pod's readiness by its probe.

use serde_json::{Map, Value, json};

use super::lines::{self, array};
use super::{AGENT_CONTAINER, Options, Wishes};

/// Adds the sidecar to a pod's spec; on an error nothing useful was added, and the name of the field at fault is returned.
pub(super) fn add(spec: &mut Map<String, Value>, target: &str, wishes: &Wishes<'_>, options: &Options) -> Result<(), &'static str> {
    let volumes = lines::volumes(spec, target, options)?;
    if !volumes.existed {
        let container = lines::target_container(spec, target)?;
        array(container, "volumeMounts").ok_or("volumeMounts")?.push(lines::shm_mount(&volumes.shm));
    }
    let mut sidecar = json!({
        "name": AGENT_CONTAINER,
        "restartPolicy": "Always",
        "command": ["/weightsync", "agent"],
        "env": lines::env(super::on_host(spec), wishes, options),
        "ports": [lines::port()],
        "readinessProbe": lines::readiness_probe(),
        "volumeMounts": [lines::shm_mount(&volumes.shm), lines::token_mount()]
    });
    lines::confine(&mut sidecar, spec, options);
    // First, so that it runs before any other sidecar that might wait for readiness.
    array(spec, "initContainers").ok_or("spec.initContainers")?.insert(0, sidecar);
    Ok(())
}
