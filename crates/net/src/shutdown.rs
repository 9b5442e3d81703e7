//! Ends a program on a signal: the first SIGTERM or SIGINT stops all parts, the second ends the process at once.
//!
//! It also decides the meaning of a SIGHUP: a closed terminal, or a request to read files again. A SIGHUP never ends a program that was
//! started with `nohup`.

use std::future::pending;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Exit status after the second signal.
const ABORTED: i32 = 130;

/// Longest time between SIGHUP and the loss of the terminal.
const DETACHED: Duration = Duration::from_millis(250);
const LOOK: Duration = Duration::from_millis(25);

/// Returns a token that the first SIGTERM or SIGINT cancels. Must be called within a runtime.
pub fn on_signals() -> std::io::Result<CancellationToken> {
    Ok(stop_on(Signals::new()?))
}

/// As [`on_signals`], and SIGHUP counts as SIGTERM, unless the program was started with `nohup`.
pub fn on_signals_and_hangup() -> std::io::Result<CancellationToken> {
    let hangup = if hangup_is_ignored() { None } else { Some(signal(SignalKind::hangup())?) };
    Ok(stop_on(Signals { hangup, ..Signals::new()? }))
}

fn stop_on(mut signals: Signals) -> CancellationToken {
    let cancel = CancellationToken::new();
    let reported = cancel.clone();
    tokio::spawn(async move {
        signals.any().await;
        tracing::info!("asked to stop");
        reported.cancel();
        // A closed terminal may send several SIGHUPs.
        signals.hangup = None;
        signals.any().await;
        tracing::warn!("asked to stop again: ending at once");
        std::process::exit(ABORTED);
    });
    cancel
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Option<Signal>,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())?, hangup: None })
    }

    async fn any(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            () = next(self.hangup.as_mut()) => {}
        }
    }
}

/// Waits for the signal; pending without end if there is none.
async fn next(signal: Option<&mut Signal>) {
    let received = match signal {
        Some(signal) => signal.recv().await,
        None => None,
    };
    if received.is_none() {
        pending::<()>().await;
    }
}

/// The meaning of a SIGHUP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hangup {
    /// The terminal in which the program was started was closed.
    Closed,
    /// Files must be read again.
    Reread,
}

/// The SIGHUPs of this process.
#[derive(Debug)]
pub struct Hangups {
    signal: Signal,
    /// Whether the program ends with its terminal.
    attached: bool,
}

impl Hangups {
    /// From now on SIGHUP does not end the process by itself. Must be called within a runtime.
    pub fn new() -> std::io::Result<Self> {
        let attached = !hangup_is_ignored() && has_terminal();
        Ok(Self { signal: signal(SignalKind::hangup())?, attached })
    }

    /// Waits for the next SIGHUP and returns its meaning.
    pub async fn next(&mut self) -> Hangup {
        next(Some(&mut self.signal)).await;
        let mut waited = Duration::ZERO;
        // The kernel may remove the terminal just after it sent the signal.
        while self.attached && waited <= DETACHED {
            if !has_terminal() {
                return Hangup::Closed;
            }
            sleep(LOOK).await;
            waited += LOOK;
        }
        Hangup::Reread
    }
}

/// Whether this process has a controlling terminal.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// Whether SIGHUP is ignored, as under `nohup`.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).map(str::trim);
    // SIGHUP is signal 1: the lowest bit.
    ignored.and_then(|mask| u64::from_str_radix(mask, 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
