//! Servers as forks of one process that has imported vLLM: fork_servers.py. It ends them all when the tests' process ends, however that ends.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::Duration;

use rustix::process::Pid;
use serde_json::{Map, Value, json};

/// An import of vLLM takes 6 s on an idle machine.
const IMPORT: Duration = Duration::from_secs(600);

static FORKS: OnceLock<Mutex<Forks>> = OnceLock::new();

struct Forks {
    /// It ends when its standard input does.
    _process: Child,
    calls: ChildStdin,
    answers: mpsc::Receiver<String>,
}

impl Forks {
    /// With the variables of the first server: vLLM and torch read some of them when they are imported.
    fn start(venv: &Path, first: &Command) -> Self {
        let mut python = Command::new(venv.join("bin/python"));
        python.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/engine/fork_servers.py"));
        python.envs(first.get_envs().filter_map(|(name, value)| Some((name, value?))).filter(|(name, _)| *name != "PYTHONPATH"));
        let mut process = python.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (calls, lines) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()).lines());
        let (answer, answers) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).all(|line| answer.send(line).is_ok()));
        Self { _process: process, calls, answers }
    }

    fn call(&mut self, call: &Value) -> Result<Value, String> {
        writeln!(self.calls, "{call}").map_err(|error| format!("fork_servers.py has ended: {error}"))?;
        let answer = self.answers.recv_timeout(IMPORT).map_err(|error| format!("fork_servers.py does not answer: {error}"))?;
        serde_json::from_str(&answer).map_err(|error| format!("{answer}: {error}"))
    }
}

/// The leader of a process group; a zombie until [`ended`](Self::ended) finds it so.
pub struct Fork(Pid);

impl Fork {
    /// Has the command `vllm serve` run in a fork.
    pub fn start(venv: &Path, command: &Command, log: &File) -> Self {
        let words: Vec<_> = [command.get_program()].into_iter().chain(command.get_args()).map(|word| word.to_str().unwrap()).collect();
        let environment: Map<String, Value> = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_str().unwrap().to_owned(), json!(value?.to_str().unwrap()))))
            .collect();
        let log = format!("/proc/{}/fd/{}", std::process::id(), log.as_raw_fd());
        let mut forks = FORKS.get_or_init(|| Mutex::new(Forks::start(venv, command))).lock().unwrap();
        let started = forks.call(&json!({"serve": words, "environment": environment, "log": log})).unwrap();
        Self(Pid::from_raw(i32::try_from(started["pid"].as_i64().unwrap()).unwrap()).unwrap())
    }

    pub fn pid(&self) -> Pid {
        self.0
    }

    /// How it ended, asked until there is an answer; none while it runs.
    pub fn ended(&self) -> Result<Option<i64>, String> {
        let mut forks = FORKS.get().unwrap().lock().map_err(|error| error.to_string())?;
        Ok(forks.call(&json!({"ended": self.0.as_raw_nonzero()}))?["status"].as_i64())
    }
}
