//! The engine's process, if this agent can see it: its start and its command line.
//!
//! GPU memory passes only between processes that see each other. So if an engine can be fed from it, `/proc` shows its process as well.
//! Decides by the command line which process serves a port. Of its environment it reads single variables by name, where the kernel shows
//! them (to the same user, and to root); never its memory.

use std::path::Path;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineProcess {
    pub(super) pid: u32,
    /// Its number and start time: differs for each start.
    pub(super) start: String,
    /// The words of its command line.
    pub(super) words: Vec<String>,
}

impl EngineProcess {
    /// Whether it still runs; cheaper than another search.
    pub(super) fn runs(&self, proc: &Path) -> bool {
        started(&proc.join(self.pid.to_string())).is_some_and(|ticks| self.start == format!("{}@{ticks}", self.pid))
    }

    /// A variable of the environment that it was started with: `Some(None)` if it has none of that name, `None` if that is not seen.
    #[allow(clippy::option_option)]
    pub(super) fn variable(&self, proc: &Path, name: &str) -> Option<Option<String>> {
        let environment = std::fs::read(proc.join(self.pid.to_string()).join("environ")).ok()?;
        let named = |entry: &[u8]| Some(String::from_utf8_lossy(entry).strip_prefix(name)?.strip_prefix('=')?.to_owned());
        Some(environment.split(|byte| *byte == 0).find_map(named))
    }

    pub(super) fn has(&self, option: &str) -> bool {
        self.words.iter().any(|word| word == option || word.strip_prefix(option).is_some_and(|rest| rest.starts_with('=')))
    }

    /// The value of an option, as the next argument or after `=`.
    pub(super) fn value(&self, option: &str) -> Option<&str> {
        let joined = || self.words.iter().find_map(|word| word.strip_prefix(option)?.strip_prefix('='));
        self.after(option).or_else(joined)
    }

    /// The argument after the first of these.
    pub(super) fn after(&self, option: &str) -> Option<&str> {
        let at = self.words.iter().position(|word| word == option)?;
        self.words.get(at + 1).map(String::as_str)
    }
}

/// The process whose command line satisfies `serves`: the one that started first, because workers may inherit their parent's command line.
pub(super) fn find(proc: &Path, serves: impl Fn(&EngineProcess) -> bool) -> Option<EngineProcess> {
    let entries = std::fs::read_dir(proc).ok()?;
    let mut found: Vec<(u64, EngineProcess)> = Vec::new();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(words) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let words: Vec<String> =
            words.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let Some(ticks) = started(&entry.path()) else { continue };
        let process = EngineProcess { pid, start: format!("{pid}@{ticks}"), words };
        if serves(&process) {
            found.push((ticks, process));
        }
    }
    found.into_iter().min_by_key(|(ticks, _)| *ticks).map(|(_, process)| process)
}

/// Field 22 of `stat`: clock ticks from the boot of the machine to the start.
fn started(process: &Path) -> Option<u64> {
    let stat = std::fs::read_to_string(process.join("stat")).ok()?;
    // The name in field 2 may hold spaces and parentheses.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}
