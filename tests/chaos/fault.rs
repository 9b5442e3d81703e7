//! How each fault is played, and how it ends. Decides nothing about when.

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use crate::checks::COMPLETIONS;
use crate::clock;
use crate::fixture::{Fixture, pod, usual};
use crate::net::Charge;
use crate::plan::{Fault, Strike};
use crate::processes::signal;
use crate::strangers::{self, Strangers};
use crate::truth::STEADY;

/// A fault that is ready to happen: whatever takes time was done.
pub struct Armed {
    process: Option<Pid>,
    charge: Option<Charge>,
    ports: Vec<SocketAddr>,
    strangers: Option<Strangers>,
    /// Lies that the liar had reported before it was to.
    reported: usize,
}

/// Name of the file that takes the room of others.
const BALLAST: &str = "ballast";

/// Finds the process that is hit.
pub async fn arm(fixture: &Fixture, strike: &Strike) -> Result<Armed, String> {
    let process = match strike.fault {
        Fault::KillAgent | Fault::KillSource | Fault::StopAgent | Fault::StopSource | Fault::HalfOpen => {
            Some(fixture.agent(strike.victim).await?)
        }
        Fault::KillEngine => Some(fixture.engine(strike.victim).await?),
        Fault::SlowEngine if slowness(strike.variant).is_none() => Some(fixture.engine(strike.victim).await?),
        Fault::LyingMember => Some(fixture.let_lie(strike.victim, strike.lie()).await?),
        _ => None,
    };
    if strike.fault == Fault::FullDisk {
        // Logs go on for a moment.
        nearly_fill(&fixture.state(), 256 << 10);
    }
    let link = &fixture.links[strike.victim];
    let charge = match strike.fault {
        Fault::HalfOpen | Fault::Blackhole => Some(link.cut()),
        Fault::SlowLink => Some(link.slow()),
        Fault::Reset => Some(link.reset()),
        _ => None,
    };
    let ports = match strike.fault {
        Fault::Strangers => strangers::ports(link, fixture.agent(strike.victim).await?)?,
        _ => Vec::new(),
    };
    Ok(Armed { process, charge, ports, strangers: None, reported: fixture.lies_sent(strike.victim).len() })
}

/// Plays it. What goes wrong from now on is named with what was done.
pub async fn strike(fixture: &Fixture, strike: &Strike, armed: &mut Armed) -> Result<(), String> {
    let done = strike_now(fixture, strike, armed).await?;
    fixture.watcher.fault(format!("{} in {}: {done}", strike.fault.name(), strike.phase.name()));
    Ok(())
}

async fn strike_now(fixture: &Fixture, strike: &Strike, armed: &mut Armed) -> Result<String, String> {
    let name = pod(strike.victim);
    if let Some(charge) = armed.charge.take() {
        charge.fire();
    }
    let send = |kind: Signal| armed.process.map_or(Err("no process".to_owned()), |pid| signal(pid, kind));
    Ok(match strike.fault {
        Fault::KillAgent | Fault::KillSource => {
            send(Signal::KILL)?;
            format!("killed the agent of {name}")
        }
        Fault::KillEngine => {
            send(Signal::KILL)?;
            format!("killed the engine of {name}")
        }
        Fault::StopAgent | Fault::StopSource => {
            send(Signal::STOP)?;
            format!("stopped the agent of {name}")
        }
        Fault::Reset => format!("reset the connections of {name}"),
        Fault::HalfOpen => {
            send(Signal::KILL)?;
            format!("killed the agent of {name} after a dead link")
        }
        Fault::Blackhole => format!("cut the link of {name}"),
        Fault::SlowLink => format!("slowed the link of {name}"),
        Fault::FullDisk => {
            fill(&fixture.state());
            "filled the disk of the epoch and the logs".to_owned()
        }
        Fault::FullMemory => {
            fill(&fixture.memory(strike.victim));
            format!("filled the memory of {name}")
        }
        Fault::ClockJump => {
            let (nanoseconds, what) = clock::jump(strike.variant);
            clock::set(&fixture.folder().join(format!("{name}.clock")), nanoseconds);
            format!("set the clock of {name} {what}")
        }
        Fault::SlowEngine => {
            if let Some((faults, what)) = slowness(strike.variant) {
                fixture.spoil(strike.victim, &faults).await;
                format!("engine of {name}: {what}")
            } else {
                send(Signal::STOP)?;
                format!("stopped the engine of {name}")
            }
        }
        Fault::LyingEngine => {
            let (faults, what) = lie(strike.variant);
            fixture.spoil(strike.victim, &faults).await;
            format!("engine of {name}: {what}")
        }
        fault if fault.is_step() => {
            let (faults, what) = step(fault, strike.variant);
            fixture.spoil(strike.victim, &faults).await;
            format!("engine of {name}: {what}")
        }
        Fault::EndRegistration => {
            fixture.end_registration(strike.victim);
            format!("ended the process that registered the engine of {name}")
        }
        Fault::LyingMember => {
            fixture.lies(strike.victim);
            format!("the agent of {name} lies: {}", strike.lie().name())
        }
        _ => {
            armed.strangers = Some(Strangers::come(&armed.ports));
            format!("strangers hold the ports of {name} and of the coordinator")
        }
    })
}

/// Ends it. What is killed is started again by the group itself.
pub async fn heal(fixture: &Fixture, strike: &Strike, armed: &mut Armed) -> Result<(), String> {
    match strike.fault {
        Fault::KillAgent | Fault::KillSource | Fault::KillEngine | Fault::Reset => {}
        Fault::StopAgent | Fault::StopSource => armed.process.map_or(Ok(()), |pid| signal(pid, Signal::CONT))?,
        Fault::HalfOpen => {
            // Its successor runs already when the link works again, so that its peers hold connections to no one.
            if let Some(before) = armed.process {
                fixture.next_agent(strike.victim, before).await?;
            }
            fixture.links[strike.victim].mend();
        }
        Fault::Blackhole | Fault::SlowLink => fixture.links[strike.victim].mend(),
        Fault::FullDisk => remove(&fixture.state()),
        Fault::FullMemory => remove(&fixture.memory(strike.victim)),
        Fault::ClockJump => clock::set(&fixture.folder().join(format!("{}.clock", pod(strike.victim))), 0),
        Fault::Strangers => armed.strangers = None,
        Fault::EndRegistration => fixture.register_again(strike.victim).await?,
        Fault::LyingMember => {
            let reported = fixture.lies_sent(strike.victim).len() - armed.reported;
            if reported == 0 {
                return Err(format!("no lie was informed: {}", strike.lie().name()));
            }
            if let Some(liar) = armed.process {
                fixture.end_of_lies(strike.victim, liar).await?;
            }
        }
        _ => {
            if let Some(pid) = armed.process {
                // It may have been started again meanwhile.
                let _ = signal(pid, Signal::CONT);
            }
            fixture.spoil(strike.victim, &usual()).await;
        }
    }
    Ok(())
}

/// Slow in one way or the other; none: it stands still.
fn slowness(variant: u64) -> Option<(Value, &'static str)> {
    match variant % 3 {
        0 => Some((json!({"loadMs": 2_500}), "a load takes 2.5 s")),
        1 => Some((json!({"loadMs": 250, "rules": [{"path": "*", "fault": {"kind": "slow", "ms": 700}}]}), "every answer takes 0.7 s")),
        _ => None,
    }
}

/// Lies about loads. What an engine does to bytes that it really read no one outside can see: no checksum of its own is in these engines.
fn lie(variant: u64) -> (Value, &'static str) {
    let answers = |body: Value| {
        let rule = |path: &str| json!({"path": path, "fault": {"kind": "answer", "status": 200, "body": body}});
        json!({"loadMs": 250, "rules": [rule("/collective_rpc"), rule("/update_weights_from_disk")]})
    };
    match variant % 3 {
        0 => (json!({"loadMs": 250, "load": "acknowledgeUnread"}), "says that it loaded, and read nothing"),
        1 => (answers(json!({"success": false, "message": "it did not work"})), "answers 200 without success"),
        _ => (
            answers(json!({"success": true, "results": [null], "error": {"message": "it did not work"}})),
            "answers 200 with an error inside",
        ),
    }
}

/// One of the last steps of an install, refused or delayed.
fn step(fault: Fault, variant: u64) -> (Value, String) {
    if fault == Fault::HalfLoad {
        let how = if variant.is_multiple_of(2) { "failHalfway" } else { "failHalfwayOnce" };
        return (json!({"loadMs": 250, "load": how}), format!("its load: {how}"));
    }
    let paths = match fault {
        Fault::PauseStep => ["/pause", "/pause_generation"],
        Fault::VersionStep => ["/update_weight_version"; 2],
        Fault::ResumeStep => ["/resume", "/continue_generation"],
        _ => [COMPLETIONS, "/generate"],
    };
    let (happens, what) = match variant % 4 {
        0 => (json!({"kind": "answer", "status": 500, "body": {"error": "it does not work"}}), "is refused"),
        1 => (json!({"kind": "hang"}), "never ends"),
        2 => (json!({"kind": "loseReply"}), "is done and not confirmed"),
        _ => (json!({"kind": "slow", "ms": 1_500}), "takes 1.5 s"),
    };
    // The text is written before a load as well, as a mark: where one call passes, the mark is taken and the version's text is not.
    let after = if fault == Fault::VersionStep { variant / 8 % 2 } else { 0 };
    let rules: Vec<Value> = paths.iter().map(|path| json!({"path": path, "after": after, "fault": happens})).collect();
    (json!({"loadMs": 250, "rules": rules}), format!("{} {what}, after {after} calls", paths.join(", ")))
}

/// How long an engine refuses a step: some seconds, or longer than any difference outside of an update may last.
pub fn held(strike: &Strike) -> Option<Duration> {
    let longer = STEADY + Duration::from_secs(2);
    strike.fault.is_step().then(|| if (strike.variant / 4).is_multiple_of(2) { Duration::from_secs(2) } else { longer })
}

/// How long a fault is left alone before the others must have noticed it, where they must: three heartbeats, and what follows.
pub fn noticed_within(fault: Fault) -> Option<Duration> {
    matches!(fault, Fault::StopAgent | Fault::StopSource | Fault::Blackhole).then_some(Duration::from_secs(15))
}

/// Takes all room there is but so much, beforehand: the rest is taken in no time then.
fn nearly_fill(folder: &Path, left: u64) {
    let found = rustix::fs::statvfs(folder).unwrap();
    let free = found.f_bavail * found.f_frsize;
    let bytes = usize::try_from(free.saturating_sub(left)).unwrap();
    std::fs::write(folder.join(BALLAST), vec![0; bytes]).unwrap();
}

/// Takes all room there is.
fn fill(folder: &Path) {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(folder.join(BALLAST)).unwrap();
    for piece in [vec![0; 64 << 10], vec![0; 4 << 10]] {
        while file.write_all(&piece).is_ok() {}
    }
}

fn remove(folder: &Path) {
    let _ = std::fs::remove_file(folder.join(BALLAST));
}
