//! Servers under test: the real vLLM as a process, or the simulator as a process of this crate's own binary.

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weightsync_engine::{ApiKey, Engine, EngineConfig, connect};

use super::client::{Client, KEY};
use super::forks::Fork;
use super::processor;

/// The virtual environment with vLLM; none where `WEIGHTSYNC_VENV` is empty.
pub fn venv() -> Option<PathBuf> {
    let venv = std::env::var_os("WEIGHTSYNC_VENV").expect("WEIGHTSYNC_VENV has vLLM: WEIGHTSYNC_VENV=$(tests/cluster/vllm-venv.sh)");
    (!venv.is_empty()).then(|| PathBuf::from(venv))
}

/// The release of that vLLM as its server reports it; the simulator's without one.
pub fn release() -> String {
    let Some(venv) = venv() else { return "0.32.0".into() };
    let code = "from importlib.metadata import version; print(version('vllm').split('+')[0], end='')";
    let printed = Command::new(venv.join("bin/python")).args(["-c", code]).output().unwrap();
    String::from_utf8(printed.stdout).unwrap()
}

/// vLLM takes 25 s on an idle machine, and minutes on one whose cores build something else.
const START: Duration = Duration::from_secs(900);

/// An agent's adapter for a server.
pub fn adapter(server: &Server, served_model: Option<PathBuf>) -> Arc<dyn Engine> {
    let api_key = Some(ApiKey::new(KEY).unwrap());
    let config = EngineConfig {
        kind: "vllm".into(),
        url: server.url.clone(),
        api_key,
        served_model,
        record: None,
        owner: "test".into(),
        processes: "/proc".into(),
        unproven_routes: false,
    };
    connect(config).unwrap()
}

/// A running server; ended with all its children when it is dropped.
pub struct Server {
    process: Process,
    pub url: String,
    /// It has no name: nothing is left of it.
    log: File,
}

enum Process {
    Started(Child),
    Forked(Fork),
}

/// How a real server starts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The program `vllm`, as a user starts it.
    ItsOwnStart,
    /// A fork of a process that has imported vLLM: README.md.
    Fork,
}

impl Server {
    /// The real vLLM 0.32 on a checkpoint; call [`ready`](Self::ready) before use.
    pub fn vllm(venv: &Path, model: &Path) -> Self {
        Self::real(By::Fork, venv, model, |_| {})
    }

    /// The same, started as a user starts it.
    pub fn vllm_by_its_own_start(venv: &Path, model: &Path) -> Self {
        Self::real(By::ItsOwnStart, venv, model, |_| {})
    }

    /// The same, one request at a time: an answer that is computed together with another one may be rounded differently.
    pub fn vllm_one_by_one(venv: &Path, model: &Path) -> Self {
        Self::real(By::Fork, venv, model, |command| _ = command.args(["--max-num-seqs", "1"]))
    }

    /// The same with WeightSync's own back end, whose package lies in that folder, and so many ranks.
    pub fn vllm_with_backend(venv: &Path, model: &Path, packages: &Path, ranks: u32) -> Self {
        // Ranks of their own import vLLM each: a fork would spare little.
        let by = if ranks > 1 { By::ItsOwnStart } else { By::Fork };
        Self::real(by, venv, model, |command| {
            command.env("PYTHONPATH", packages).args(["--weight-transfer-config", r#"{"backend": "weightsync"}"#]);
            if ranks > 1 {
                let ranks = ranks.to_string();
                command.args(["--tensor-parallel-size", &ranks, "--distributed-executor-backend", "mp"]);
                command.env("VLLM_ENABLE_V1_MULTIPROCESSING", "1");
            }
        })
    }

    /// The same with a model that drafts two tokens at a time.
    pub fn vllm_with_draft(venv: &Path, model: &Path, draft: &Path, packages: &Path) -> Self {
        Self::real(By::Fork, venv, model, |command| {
            let speculation = serde_json::json!({"method": "draft_model", "model": draft, "num_speculative_tokens": 2});
            command.env("PYTHONPATH", packages).args(["--weight-transfer-config", r#"{"backend": "weightsync"}"#]);
            command.args(["--speculative-config", &speculation.to_string()]);
        })
    }

    fn real(by: By, venv: &Path, model: &Path, more: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(venv.join("bin/vllm"));
        let port = free_port();
        command.arg("serve").arg(model).args(["--served-model-name", "m", "--host", "127.0.0.1", "--port", &port.to_string()]);
        command.args([
            "--dtype",
            "bfloat16",
            "--enforce-eager",
            "--max-model-len",
            "512",
            "--max-num-seqs",
            "4",
            "--num-gpu-blocks-override",
            "128",
            "--enable-prefix-caching",
            "--distributed-executor-backend",
            "uni",
        ]);
        for (name, value) in [
            ("VLLM_SERVER_DEV_MODE", "1"),
            ("VLLM_API_KEY", KEY),
            ("VLLM_TARGET_DEVICE", "cpu"),
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            // What lets `uni` run on CPU, and keeps the first log-probs from compiling C++: README.md.
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
            ("TORCHDYNAMO_DISABLE", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
        ] {
            command.env(name, value);
        }
        command.envs(processor::environment().iter().copied());
        more(&mut command);
        if by == By::ItsOwnStart {
            return Self::start(command, port);
        }
        let log = tempfile::tempfile().unwrap();
        let fork = Fork::start(venv, &command, &log);
        Self { process: Process::Forked(fork), url: format!("http://127.0.0.1:{port}"), log }
    }

    /// The simulator on a checkpoint.
    pub fn simulator(model: &Path, faults: &str) -> Self {
        Self::simulated(model, faults, |_| {})
    }

    /// The same with WeightSync's own back end.
    pub fn simulator_with_backend(model: &Path, faults: &str, ranks: u32) -> Self {
        Self::simulated(model, faults, |command| {
            command.args(["--weightsync-backend", "--no-ray", "--world-size", &ranks.to_string()]);
        })
    }

    /// The simulator with that back end and a draft model.
    pub fn simulator_with_draft(model: &Path, draft: &Path) -> Self {
        Self::simulated(model, r#"{"tokenMs":10}"#, |command| {
            command.args(["--weightsync-backend", "--no-ray"]).arg("--draft").arg(draft);
        })
    }

    fn simulated(model: &Path, faults: &str, more: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(weightsync_testkit::dev_program());
        let port = free_port();
        command.args(["simulate-engine", "--engine", "vllm", "--served-model-name", "m", "--port", &port.to_string()]);
        command.args(["--max-model-len", "512", "--api-key-env", "SIMULATOR_KEY", "--faults", faults]).arg("--model").arg(model);
        command.env("SIMULATOR_KEY", KEY);
        more(&mut command);
        Self::start(command, port)
    }

    fn start(mut command: Command, port: u16) -> Self {
        let log = tempfile::tempfile().unwrap();
        let [out, errors] = [(); 2].map(|()| log.try_clone().unwrap());
        let child = command.stdin(Stdio::null()).stderr(errors).stdout(out).process_group(0).spawn().unwrap();
        Self { process: Process::Started(child), url: format!("http://127.0.0.1:{port}"), log }
    }

    /// Waits until it answers and has generated its first token, which takes vLLM seconds.
    pub async fn ready(&mut self) -> Client {
        let client = Client::new(&self.url);
        let deadline = Instant::now() + START;
        while client.get("/health").await.status != Some(200) {
            let ended = self.ended();
            assert!(ended.is_none() && Instant::now() < deadline, "the server did not start ({ended:?}):\n{}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        client.complete("Warm up", 1).await;
        client
    }

    /// How it ended; none while it runs.
    pub fn ended(&mut self) -> Option<String> {
        match &mut self.process {
            Process::Started(child) => child.try_wait().unwrap().map(|status| format!("the server ended: {status}")),
            Process::Forked(fork) => match fork.ended() {
                Ok(status) => status.map(|status| format!("the server ended with {status}")),
                Err(why) => Some(why),
            },
        }
    }

    fn log_tail(&self) -> String {
        let mut log = vec![0; usize::try_from(self.log.metadata().map_or(0, |about| about.len())).unwrap()];
        // Not by a seek, which would move the place where the server writes.
        let _read = self.log.read_exact_at(&mut log, 0);
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let group = match &self.process {
            Process::Started(child) => rustix::process::Pid::from_child(child),
            Process::Forked(fork) => fork.pid(),
        };
        let _sent = rustix::process::kill_process_group(group, rustix::process::Signal::TERM);
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline && self.ended().is_none() {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _sent = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        if let Process::Started(child) = &mut self.process {
            let _ended = child.wait();
        }
    }
}

/// A port that was free a moment ago, drawn from those that the kernel gives to no connection by itself.
fn free_port() -> u16 {
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::iter::repeat_with(|| rand::random_range(15_000..30_000)).find(free).unwrap()
}

#[test]
fn a_processor_that_is_not_known_has_no_variables() {
    assert_eq!(processor::variables("avx2").map(<[_]>::len), Some(2));
    assert_eq!(processor::variables("").map(<[_]>::len), Some(0));
    assert_eq!(processor::variables("AVX2"), None);
}
