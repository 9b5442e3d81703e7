//! Signals to containers' processes, sent on the node: what a kernel or a neighbour does to a pod, no API can.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::process::Command;

use super::cluster::{Cluster, eventually};

/// How long one `docker exec` may take. Docker 20.10 loses the end of a command now and then, and its client then waits for ever: the
/// command ran, or it did not, so whatever is run here must bear being run twice.
const EXEC: Duration = Duration::from_secs(8);

/// Runs a command on kind's node, again where docker does not come back.
pub async fn on_node(arguments: &[&str]) -> String {
    let node = format!("{}-control-plane", std::env::var("WEIGHTSYNC_CLUSTER").unwrap_or_else(|_| "weightsync".into()));
    for _ in 0..5 {
        let run = Command::new("docker").arg("exec").arg(&node).args(arguments).kill_on_drop(true).output();
        let Ok(output) = tokio::time::timeout(EXEC, run).await else { continue };
        let output = output.expect("docker runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        return String::from_utf8_lossy(&output.stdout).trim().to_owned();
    }
    panic!("docker exec did not come back five times: {arguments:?}");
}

/// The process id, on the node, of a container's first process. While a container is being restarted its pod's status names the one that
/// ended, whose process id the runtime gives as 0, and a signal to process 0 goes to anyone who sends it: asked again until there is one.
pub async fn process(cluster: &Cluster, pod: &str, container: &str) -> String {
    eventually(&format!("{pod}/{container} runs a process"), 5 * EXEC, || async {
        let object = cluster.api::<Pod>().get(pod).await.map_err(|error| error.to_string())?;
        let status = object.status.ok_or("no status")?;
        let all = status.container_statuses.into_iter().flatten().chain(status.init_container_statuses.into_iter().flatten());
        let id = all.filter(|status| status.name == container).find_map(|status| status.container_id).ok_or("it has no id yet")?;
        let id = id.trim_start_matches("containerd://").to_owned();
        let process = on_node(&["crictl", "inspect", "--output", "go-template", "--template", "{{.info.pid}}", &id]).await;
        if process.parse::<u32>().is_ok_and(|process| process > 0) {
            Ok(process)
        } else {
            Err(format!("container {id} has process {process}"))
        }
    })
    .await
}

/// Sends a signal to a process of the node; one that is gone already had it.
pub async fn send(process: &str, signal: &str) {
    on_node(&["sh", "-c", &format!("kill -{signal} {process} || ! kill -0 {process}")]).await;
}

/// Sends a signal to the first process of a container.
pub async fn signal(cluster: &Cluster, pod: &str, container: &str, signal: &str) {
    let process = process(cluster, pod, container).await;
    send(&process, signal).await;
}

/// The process id, on the node, of a program that runs there once: a part of Kubernetes itself.
pub async fn program(name: &str) -> String {
    on_node(&["pgrep", "-o", "-x", name]).await
}

/// A process of the node that stands still. It goes on by itself after its time, whatever becomes of the test.
pub struct Frozen {
    folder: String,
}

impl Frozen {
    /// Stops a process for `seconds`, or until it is thawed. It stands still when this returns: a signal takes effect a little after it
    /// was sent, and the thread that had a CPU at that moment may still have answered somebody.
    pub async fn new(process: &str, seconds: u32) -> Self {
        let folder = format!("/run/frozen-{}", uuid::Uuid::new_v4());
        let moving = format!("grep -L ^State:.T /proc/{process}/task/*/status | grep -q .");
        // Made once, also where docker has the command run twice.
        let body = format!(
            "kill -STOP {process}; \
             while {moving}; do sleep 0.01; done; \
             date +%s.%N >{folder}/at; mv {folder}/at {folder}/from; \
             for _ in $(seq {}); do [ -e {folder}/thaw ] && break; sleep 0.1; done; \
             date +%s.%N >{folder}/to; kill -CONT {process}; mv {folder}/to {folder}/until",
            seconds * 10
        );
        let script = format!("mkdir {folder} 2>/dev/null || exit 0; setsid sh -c '{body}' >/dev/null 2>&1 </dev/null &");
        on_node(&["sh", "-c", &script]).await;
        eventually("the process stands still", EXEC, || async {
            let still = on_node(&["sh", "-c", &format!("ls {folder}/from 2>/dev/null || true")]).await;
            if still.is_empty() { Err("it has a thread that runs".to_owned()) } else { Ok(()) }
        })
        .await;
        Self { folder }
    }

    /// Lets it go on now.
    pub async fn thaw(&self) {
        on_node(&["touch", &format!("{}/thaw", self.folder)]).await;
    }

    /// From when until when it stood still, in seconds since 1970 by the machine's clock; waits for its end.
    pub async fn ended(&self, timeout: Duration) -> (f64, f64) {
        let times = format!("cat {0}/from {0}/until 2>/dev/null || true", self.folder);
        eventually("the process goes on", timeout, || async {
            let said = on_node(&["sh", "-c", &times]).await;
            let times: Vec<f64> = said.lines().filter_map(|line| line.parse().ok()).collect();
            if let [from, until] = times[..] { Ok((from, until)) } else { Err(said) }
        })
        .await
    }
}
