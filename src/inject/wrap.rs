//! The agent inside the container of the engine or trainer: an init container copies the program, `weightsync run` starts the container's
//! own command. So it shares devices, libraries, shared memory and control group, and is the parent of what it watches.
//!
//! Command and arguments stay as the template has them. What stands in an image only cannot be known here: such a container is refused.

use serde_json::{Map, Value, json};

use super::lines::{self, array};
use super::{Options, PROGRAM_CONTAINER, Wishes};

/// Where the program lies in the wrapped container.
pub const PROGRAM_DIR: &str = "/opt/weightsync";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WrapError {
    NoCommand,
    /// This field is not what Kubernetes expects.
    Malformed(&'static str),
}

impl From<&'static str> for WrapError {
    fn from(field: &'static str) -> Self {
        Self::Malformed(field)
    }
}

/// Wraps the container `target` of a pod's spec; on an error nothing useful was added.
pub(super) fn add(spec: &mut Map<String, Value>, target: &str, wishes: &Wishes<'_>, options: &Options) -> Result<(), WrapError> {
    let command = match lines::target_container(spec, target)?.get("command") {
        None | Some(Value::Null) => Vec::new(),
        Some(command) => command.as_array().cloned().ok_or("command")?,
    };
    if command.is_empty() {
        return Err(WrapError::NoCommand);
    }
    let volumes = lines::volumes(spec, target, options)?;
    let program = |read_only: bool| {
        if read_only {
            json!({"name": PROGRAM_CONTAINER, "mountPath": PROGRAM_DIR, "readOnly": true})
        } else {
            json!({"name": PROGRAM_CONTAINER, "mountPath": PROGRAM_DIR})
        }
    };
    array(spec, "volumes").ok_or("spec.volumes")?.push(json!({"name": PROGRAM_CONTAINER, "emptyDir": {}}));
    let mut copies =
        json!({"name": PROGRAM_CONTAINER, "command": ["/weightsync", "install", PROGRAM_DIR], "volumeMounts": [program(false)]});
    lines::confine(&mut copies, spec, options);
    array(spec, "initContainers").ok_or("spec.initContainers")?.insert(0, copies);

    let env = lines::env(super::on_host(spec), wishes, options);
    let container = lines::target_container(spec, target)?;
    let mut wrapped = vec![json!(format!("{PROGRAM_DIR}/weightsync")), json!("run"), json!("--")];
    wrapped.extend(command);
    container.insert("command".to_owned(), Value::Array(wrapped));
    let present = array(container, "env").ok_or("env")?;
    let name = |entry: &Value| entry.get("name").and_then(Value::as_str).map(str::to_owned);
    // What the container sets itself stays as it is.
    let taken: Vec<_> = present.iter().filter_map(name).collect();
    present.extend(env.into_iter().filter(|entry| name(entry).is_none_or(|name| !taken.contains(&name))));
    let mounts = array(container, "volumeMounts").ok_or("volumeMounts")?;
    if !volumes.existed {
        mounts.push(lines::shm_mount(&volumes.shm));
    }
    mounts.push(lines::token_mount());
    mounts.push(program(true));
    array(container, "ports").ok_or("ports")?.push(lines::port());
    if wishes.role == "rollout" {
        // The agent asks the engine itself; a trainer's readiness is its own affair.
        container.insert("readinessProbe".to_owned(), lines::readiness_probe());
    }
    Ok(())
}
