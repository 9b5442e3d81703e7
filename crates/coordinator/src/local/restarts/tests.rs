use std::time::{Duration, Instant};

use super::{Restarts, WORKED};

/// Before, a process that ended now and then, after hours of work each time, waited 30 s in the end.
#[test]
fn process_that_worked_restarts_at_once_else_backs_off() {
    let mut restarts = Restarts::new();
    let mut now = Instant::now();
    let mut ran = |restarts: &mut Restarts, long: Duration| {
        restarts.started(now);
        now += long;
        restarts.ended(now)
    };
    let waits: Vec<Duration> = (0..8).map(|_| ran(&mut restarts, Duration::from_secs(1))).collect();
    assert!(waits[0] <= Duration::from_millis(200) && waits[7] > Duration::from_secs(10), "{waits:?}");
    for _ in 0..8 {
        assert!(ran(&mut restarts, WORKED) <= Duration::from_millis(200));
    }
    // A process that cannot be started has failed as well.
    assert!(restarts.ended(Instant::now()) > Duration::from_millis(100));
}
