use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use super::*;

const LONG: Duration = Duration::from_secs(60);

fn child(words: &[&str]) -> (Child, Pid) {
    let child = Command::new(words[0]).args(&words[1..]).process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    (child, pid)
}

fn lines(lines: &[Line]) -> String {
    lines.iter().map(|line| line.to_string() + "\n").collect()
}

#[test]
fn guard_ends_what_was_named_and_nothing_else() {
    let [(mut agent, first), (mut engine, second), (mut ended, third), (mut other, _)] = [(); 4].map(|()| child(&["sleep", "600"]));
    let started = |pid, whole| Line::Started(Ward { pid, whole, grace: LONG });
    let said = lines(&[started(first, Whole::Process), started(second, Whole::Group), started(third, Whole::Process), Line::Ended(third)]);
    // Their parent runs and does not reap them: they have ended once only their entries in the process table are left.
    run(said.as_bytes()).unwrap();
    for child in [&mut agent, &mut engine] {
        assert!(!child.try_wait().unwrap().expect("it ended").success());
    }
    for child in [&mut ended, &mut other] {
        assert!(child.try_wait().unwrap().is_none(), "it runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn guard_kills_what_does_not_end_in_time() {
    let (mut deaf, pid) = child(&["sh", "-c", "trap '' TERM; echo; while :; do sleep 600; done"]);
    // From here on it ignores the signal.
    io::BufReader::new(deaf.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    run(lines(&[Line::Started(Ward { pid, whole: Whole::Group, grace: Duration::from_millis(1) })]).as_bytes()).unwrap();
    assert!(!deaf.try_wait().unwrap().expect("it ended").success());
}

#[test]
fn guard_refuses_a_line_that_names_more_than_one_process() {
    for line in ["started 0 group 5", "started -1 process 5", "started 1 group 5", "started 7 all 5", "ended", "hello"] {
        assert!(line.parse::<Line>().is_err(), "{line}");
        assert_eq!(run(format!("{line}\n").as_bytes()).unwrap_err().kind(), io::ErrorKind::InvalidData, "{line}");
    }
}
