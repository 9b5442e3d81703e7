//! Whether this host has room for the demo, before anything starts. Decides what is too little, and says what to change.

use std::path::Path;

use weightsync_agent::space::{Cgroups, free_in};

/// Where versions lie for the engines.
const SHARED_MEMORY: &str = "/dev/shm";
/// Versions that a replica holds at once in an update.
const VERSIONS_AT_ONCE: u64 = 2;
/// Memory of an agent and a simulated engine besides the versions, in MiB.
const PROCESSES: u64 = 64;
/// Memory of a real vLLM server with the demo's model, in MiB.
const REAL_SERVER: u64 = 900;

/// What the demo would use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    pub replicas: u32,
    /// Size of the model in MiB.
    pub megabytes: u32,
    /// Whether the servers are real ones.
    pub real: bool,
}

/// What the host has, in MiB; `None` where it cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    pub shared: Option<u64>,
    pub memory: Option<u64>,
}

impl Free {
    /// Reads what this host has now.
    pub fn read() -> Self {
        let shared = free_in(Path::new(SHARED_MEMORY)).ok().map(|bytes| bytes >> 20);
        let memory = Cgroups::of_this_process().free_memory().map(|bytes| bytes >> 20);
        Self { shared, memory }
    }
}

/// Why the demo cannot run, with what to do.
pub fn lack(need: Need, free: Free) -> Option<String> {
    let replicas = u64::from(need.replicas);
    let shared = VERSIONS_AT_ONCE * replicas * u64::from(need.megabytes);
    let process = if need.real { REAL_SERVER } else { PROCESSES };
    let memory = shared + replicas * process;
    let smaller = || {
        let fits = free.shared.unwrap_or(0).min(free.memory.unwrap_or(0)) / (VERSIONS_AT_ONCE * replicas.max(1));
        if need.real || fits < 8 { String::new() } else { format!(", or take a smaller model: --megabytes {fits}") }
    };
    match free {
        Free { shared: Some(has), .. } if has < shared => Some(format!(
            "{SHARED_MEMORY} has {has} MiB free, and the demo needs {shared} MiB there. In a container, give it more (docker run \
             --shm-size={}m){}",
            shared.next_multiple_of(64),
            smaller()
        )),
        Free { memory: Some(has), .. } if has < memory => Some(format!(
            "{has} MiB of memory are free on this host or under this process's limit, and the demo needs {memory} MiB. End other programs{}",
            smaller()
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{Free, Need, lack};

    #[test]
    fn docker_default_of_shared_memory_is_refused_with_option() {
        let need = Need { replicas: 3, megabytes: 256, real: false };
        let found = lack(need, Free { shared: Some(64), memory: Some(16_000) }).unwrap();
        assert!(found.contains("has 64 MiB free") && found.contains("needs 1536 MiB") && found.contains("--shm-size=1536m"), "{found}");
        assert!(found.contains("--megabytes 10"), "{found}");
        assert_eq!(lack(need, Free { shared: Some(1536), memory: Some(16_000) }), None);
    }

    #[test]
    fn little_memory_is_refused_also_for_real_servers() {
        let need = Need { replicas: 2, megabytes: 8, real: true };
        let found = lack(need, Free { shared: Some(4000), memory: Some(1000) }).unwrap();
        assert!(found.contains("1000 MiB of memory are free") && !found.contains("--megabytes"), "{found}");
    }

    #[test]
    fn host_that_cannot_be_read_is_not_refused() {
        assert_eq!(lack(Need { replicas: 3, megabytes: 256, real: false }, Free { shared: None, memory: None }), None);
    }
}
