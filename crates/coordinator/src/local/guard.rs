//! A process that outlives this one and ends the processes that this one started: SIGKILL and a closed terminal leave a program no time for
//! it.
//!
//! This side writes the running processes to the guard's standard input, one a line. The other side, [`run`], acts when that input ends. It
//! ends only processes that were named and still run. It leaves a process id alone that another process has by then.

use std::fmt::{self, Display};
use std::io::{self, BufRead};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::{Child, Command};

/// Interval at which the guard checks whether processes ended.
const LOOK: Duration = Duration::from_millis(20);
/// Longest wait for processes to end after SIGKILL.
const KILLED: Duration = Duration::from_secs(5);
/// Most processes that are guarded; a group has two for each pod.
const MOST: usize = 4096;

/// Which processes get the signals to a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whole {
    /// The child alone.
    Process,
    /// Its process group too: engines start workers of their own.
    Group,
}

/// The guard of the processes of one group. When it is dropped or this process dies, the guard ends those that still run.
#[derive(Debug)]
pub(super) struct Guard {
    input: OwnedFd,
    _child: Child,
}

impl Guard {
    /// Starts `program guard` with a log of its own.
    pub(super) fn start(program: &Path, log: &Path) -> io::Result<Self> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log)?;
        let mut command = Command::new(program);
        command.arg("guard").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log);
        // A signal from the terminal to our process group must not end the guard before us.
        command.process_group(0);
        let mut child = command.spawn()?;
        let input = child.stdin.take().ok_or_else(|| io::Error::other("the guard has no standard input"))?;
        // Not awaited: tokio reaps it when it ended.
        Ok(Self { input: input.into_owned_fd()?, _child: child })
    }

    pub(super) fn started(&self, pid: Pid, whole: Whole, grace: Duration) {
        self.say(&Line::Started(Ward { pid, whole, grace }));
    }

    pub(super) fn ended(&self, pid: Pid) {
        self.say(&Line::Ended(pid));
    }

    /// The write does not block: a line is shorter than the pipe's buffer.
    fn say(&self, line: &Line) {
        if let Err(error) = rustix::io::write(&self.input, format!("{line}\n").as_bytes()) {
            tracing::warn!(%error, "cannot register a process with the guard: it may outlive this program if that is killed");
        }
    }
}

/// A process to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ward {
    pid: Pid,
    whole: Whole,
    /// Time between SIGTERM and SIGKILL.
    grace: Duration,
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    Started(Ward),
    Ended(Pid),
}

impl Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started(Ward { pid, whole, grace }) => {
                let word = match whole {
                    Whole::Process => "process",
                    Whole::Group => "group",
                };
                write!(f, "started {} {word} {}", pid.as_raw_nonzero(), grace.as_millis())
            }
            Self::Ended(pid) => write!(f, "ended {}", pid.as_raw_nonzero()),
        }
    }
}

impl FromStr for Line {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        // 0, 1 and negative numbers address more than one process.
        let pid = |word: &str| word.parse().ok().filter(|pid| *pid > 1).and_then(Pid::from_raw).ok_or(());
        match line.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["started", of, word, grace] => {
                let whole = match *word {
                    "process" => Whole::Process,
                    "group" => Whole::Group,
                    _ => return Err(()),
                };
                Ok(Self::Started(Ward { pid: pid(of)?, whole, grace: Duration::from_millis(grace.parse().map_err(|_| ())?) }))
            }
            ["ended", of] => Ok(Self::Ended(pid(of)?)),
            _ => Err(()),
        }
    }
}

/// A named process and its start time.
struct Guarded {
    ward: Ward,
    began: u64,
}

impl Guarded {
    fn runs(&self) -> bool {
        began(self.ward.pid) == Some(self.began)
    }

    fn signal(&self, signal: Signal) {
        // An error means that the process has ended.
        let _ = match self.ward.whole {
            Whole::Process => kill_process(self.ward.pid, signal),
            Whole::Group => kill_process_group(self.ward.pid, signal),
        };
    }
}

/// Records the processes that `input` names. When `input` ends, it ends those that still run.
///
/// # Errors
///
/// A line is invalid, or there are more processes than a group can have. Processes that were named before are ended anyway.
pub fn run(input: impl BufRead) -> io::Result<()> {
    let mut guarded = Vec::new();
    let read = follow(input, &mut guarded);
    // Agents first: they resume engines that they paused, and complete their work with them, while the engines still respond.
    let (agents, engines): (Vec<Guarded>, Vec<Guarded>) = guarded.into_iter().partition(|guarded| guarded.ward.whole == Whole::Process);
    end(&agents);
    end(&engines);
    read
}

fn follow(input: impl BufRead, guarded: &mut Vec<Guarded>) -> io::Result<()> {
    for line in input.lines() {
        let line = line?;
        let nonsense = || io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} names no process"));
        match line.parse().map_err(|()| nonsense())? {
            Line::Started(_) if guarded.len() >= MOST => return Err(io::Error::other(format!("more than {MOST} processes"))),
            Line::Started(ward) => guarded.extend(began(ward.pid).map(|began| Guarded { ward, began })),
            Line::Ended(pid) => guarded.retain(|guarded| guarded.ward.pid != pid),
        }
    }
    Ok(())
}

fn end(guarded: &[Guarded]) {
    let running = || guarded.iter().filter(|guarded| guarded.runs());
    let begun = Instant::now();
    for guarded in running() {
        eprintln!("the program that started process {} is gone: it is asked to end", guarded.ward.pid.as_raw_nonzero());
        guarded.signal(Signal::TERM);
        // A stopped process cannot end.
        guarded.signal(Signal::CONT);
    }
    while running().any(|guarded| begun.elapsed() < guarded.ward.grace) {
        std::thread::sleep(LOOK);
    }
    for guarded in running() {
        eprintln!("process {} did not end in time: it is killed", guarded.ward.pid.as_raw_nonzero());
        guarded.signal(Signal::KILL);
    }
    let killed = Instant::now();
    while running().next().is_some() && killed.elapsed() < KILLED {
        std::thread::sleep(LOOK);
    }
}

/// Start time of a process, in ticks since the boot; `None` if it has ended.
fn began(pid: Pid) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // A process name may contain anything. After its last parenthesis come the state and, twenty fields later, the start time.
    let mut words = stat.rsplit(')').next()?.split_whitespace();
    let state = words.next()?;
    words.nth(18).filter(|_| !matches!(state, "Z" | "X"))?.parse().ok()
}

#[cfg(test)]
mod tests;
