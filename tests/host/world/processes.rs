//! Finds the processes of a world: agents by the pod that their environment names.

use rustix::process::Pid;

/// Children of a process, with their environment.
pub(super) fn children(parent: u32) -> Vec<(Pid, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // The name of a process may hold anything; after its last parenthesis stand state and parent.
        let ppid = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        if ppid == Some(parent) {
            found.push((Pid::from_raw(pid).unwrap(), std::fs::read(entry.path().join("environ")).unwrap_or_default()));
        }
    }
    found
}

/// The agent of a pod.
pub(super) fn agent_of(local: u32, pod: &str) -> Option<Pid> {
    let variable = format!("POD_NAME={pod}");
    let of_pod = |environment: &[u8]| environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes());
    children(local).into_iter().find(|(_, environment)| of_pod(environment)).map(|(pid, _)| pid)
}
