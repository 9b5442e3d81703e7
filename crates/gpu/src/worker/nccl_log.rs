//! What NCCL's log says of the network that a group uses, and the settings by which NCCL is asked for that.
//!
//! Pure: lines in, facts out. The texts are those of NCCL 2.18 to 2.31 (`src/transport/net.cc`, `net_ib`, `net_socket.cc`, `src/debug.cc`). A line
//! that is not known here changes nothing.

/// Before the number of a group, in a line that a worker writes when it joined: all of NCCL's lines about the group come before.
const JOINED: &str = "weightsync worker: joined group ";

/// The cause where the log has none. NCCL 2.28 writes no line for `NCCL_NET=Socket`.
const UNKNOWN: &str = "NCCL's log has no cause (NCCL_NET may choose the network)";

/// Longest cause that is kept, in bytes.
const LONGEST_CAUSE: usize = 256;

/// The line by which a worker says that it joined.
pub(super) fn joined(group: u64) -> String {
    format!("{JOINED}{group}")
}

/// What a worker whose log is to be read gets.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Settings {
    /// For NCCL.
    pub environment: [(&'static str, String); 2],
    /// Whether the user did not ask for NCCL's information: it is read and not shown.
    pub quiet: bool,
}

/// The settings of a worker whose log is to be read, given what the user set.
///
/// `INFO` or more stays as it is. Of less, `INFO` is made, and its lines are not shown. Excluded subsystems (`^NET`) stay excluded.
pub(super) fn settings(level: Option<&str>, subsystems: Option<&str>) -> Settings {
    let shown = level.filter(|level| ["INFO", "ABORT", "TRACE"].iter().any(|one| level.eq_ignore_ascii_case(one)));
    let subsystems = match subsystems {
        None | Some("") => "INIT,NET,ENV".to_owned(),
        Some(named) if named.starts_with('^') || named.eq_ignore_ascii_case("ALL") => named.to_owned(),
        Some(named) => format!("{named},INIT,NET,ENV"),
    };
    let environment = [("NCCL_DEBUG", shown.unwrap_or("INFO").to_owned()), ("NCCL_DEBUG_SUBSYS", subsystems)];
    Settings { environment, quiet: shown.is_none() }
}

/// What a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    /// Information of NCCL.
    Info,
    /// The worker joined this group.
    Joined(u64),
    /// A warning of NCCL, or anything else.
    Other,
}

/// What was read so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NcclLog {
    /// Whether a connection of the latest group passes TCP sockets.
    sockets: bool,
    /// Why this process uses no InfiniBand. It holds for all its groups.
    no_ib: Option<String>,
    /// The selection of devices, where the user made one.
    selected: Option<String>,
}

impl NcclLog {
    /// Another group is joined.
    pub(super) fn begins(&mut self) {
        self.sockets = false;
    }

    /// Why broadcasts of the latest group pass TCP sockets; none where none of its connections does.
    pub(super) fn over_sockets(&self) -> Option<String> {
        let why = self.no_ib.as_deref().unwrap_or(UNKNOWN);
        let selected = self.selected.as_ref().map(|selected| format!(" ({selected})")).unwrap_or_default();
        self.sockets.then(|| format!("{why}{selected}"))
    }

    /// Takes the next line.
    pub(super) fn read(&mut self, line: &str) -> Line {
        if let Some(group) = line.strip_prefix(JOINED).and_then(|group| group.trim().parse().ok()) {
            return Line::Joined(group);
        }
        let said = |mark: &str| line.split_once(mark).map(|(_, text)| text.trim());
        match (said(" NCCL INFO "), said(" NCCL WARN ")) {
            (Some(text), _) => {
                self.take(text);
                Line::Info
            }
            (None, Some(text)) => {
                self.take(text);
                Line::Other
            }
            (None, None) => Line::Other,
        }
    }

    fn take(&mut self, text: &str) {
        let starts = |with: &str| text.starts_with(with);
        let cause = || Some(text.trim_end_matches('.').chars().take(LONGEST_CAUSE).collect::<String>());
        let chosen = starts("NCCL_NET set by environment to ") && !text.ends_with(" IB");
        let disabled = starts("NCCL_IB_DISABLE set by environment to ") && !text.trim_end_matches('.').ends_with(" 0");
        let refused = starts("Failed to open libibverbs") || starts("NET/IB : Unable to open device ");
        if starts("Channel ") && text.contains(" via NET/Socket/") {
            self.sockets = true;
        } else if chosen || disabled || refused {
            self.no_ib = cause();
        } else if starts("NET/IB : No device found") || starts("NET/IB : No IP interface found") {
            // What came before says more.
            self.no_ib = self.no_ib.take().or_else(cause);
        } else if starts("NET/IB : Using [0]") {
            self.no_ib = None;
        } else if starts("NCCL_IB_HCA set to ") {
            self.selected = cause();
        }
    }
}

#[cfg(test)]
mod tests;
