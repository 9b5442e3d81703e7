//! The agent's side against processes that are no good workers: each wait ends, with the cause. What a worker does with a GPU is tested on
//! the stand-in of `tests/fakegpu`, in `tests/host/gpu`.

mod fabric;

use std::time::Duration;

use super::process::LOOK;
use super::ring::Ring;
use super::{Broadcast, GRACE, Worker, WorkerError, WorkerStart, held};
use weightsync_core::protocol::worker::{Opaque, WorkerResource};

const SOON: Duration = Duration::from_millis(300);
/// For what ends by itself. An emulated machine among other work takes more than 20 s to open NIXL.
const AMPLE: Duration = Duration::from_secs(120);

fn start(script: &str) -> Worker {
    Worker::start(&WorkerStart::new("/bin/sh", &["-c", script], "test")).unwrap()
}

fn gone(error: WorkerError) -> String {
    match error {
        WorkerError::Gone { cause } => cause,
        other => panic!("{other}"),
    }
}

/// The clock stands while nothing but a timer is waited for: whatever the machine does, it shows the deadline alone.
#[tokio::test(start_paused = true)]
async fn worker_that_never_answers_is_killed_with_a_cause() {
    let worker = start("exec sleep 60");
    let begun = tokio::time::Instant::now();
    let cause = gone(worker.stats(SOON).await.unwrap_err());
    assert!(cause.contains("did not count what it holds in 300ms"), "{cause}");
    assert!((SOON + GRACE..=SOON + GRACE + LOOK).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    // It is gone for anyone who asks later, at once.
    assert_eq!(gone(worker.unique_id(AMPLE).await.unwrap_err()), cause);
    assert!(worker.ended().await.contains("did not count what it holds"));
}

#[tokio::test]
async fn ended_worker_fails_calls_with_exit_and_last_lines() {
    let worker = start("head -c1 >/dev/null; echo 'the driver burns' >&2; exit 3");
    let (first, second) = tokio::join!(worker.stats(AMPLE), worker.new_event(AMPLE));
    for error in [first.unwrap_err(), second.map(|_| ()).unwrap_err()] {
        let cause = gone(error);
        assert!(cause.contains("exit status: 3") && cause.contains("the driver burns"), "{cause}");
    }
}

#[tokio::test]
async fn a_worker_that_talks_nonsense_is_not_waited_for() {
    // The socket is its standard input; it writes there what is longer than any frame.
    let worker = start(r"printf '\377\377\377\377' >&0; exec sleep 60");
    let cause = gone(worker.stats(AMPLE).await.unwrap_err());
    assert!(cause.contains("closed its socket"), "{cause}");
}

#[tokio::test]
async fn killing_a_worker_fails_everything_with_the_reason() {
    let worker = start("exec sleep 60");
    let stats = tokio::spawn({
        let worker = worker.clone();
        async move { worker.stats(AMPLE).await }
    });
    tokio::task::yield_now().await;
    worker.kill("its group is fenced");
    assert!(gone(stats.await.unwrap().unwrap_err()).contains("its group is fenced"));
    tokio::time::timeout(AMPLE, worker.ended()).await.unwrap();
}

#[tokio::test]
async fn a_program_that_is_not_there_is_an_error_that_names_it() {
    let start = WorkerStart::new("/nowhere/worker", &[], "test");
    let error = Worker::start(&start).err().unwrap().to_string();
    assert!(error.contains("/nowhere/worker"), "{error}");
}

#[tokio::test]
async fn slot_stays_taken_while_a_request_may_write_into_it() {
    let worker = start("exec sleep 60");
    let resource = held::Resource::new(&worker, WorkerResource::Ring(1));
    let ring = Ring::new(worker.clone(), 1, 2, 64, Opaque([0; 64]), resource);
    let slot = ring.take(SOON).await.unwrap();
    assert_eq!((slot.index(), slot.offset(), ring.free()), (0, 0, 1));
    let other = ring.try_take().unwrap();
    assert_eq!((other.index(), other.offset()), (1, 64));
    assert!(matches!(ring.take(Duration::from_millis(10)).await, Err(WorkerError::NoSlot { .. })));
    drop(other);

    let broadcast = Broadcast { group: 1, root: 0, at: slot.at(0), bytes: 64, parts: Vec::new(), after: None };
    drop(worker.broadcast_now(broadcast, AMPLE));
    drop(slot);
    assert_eq!(ring.free(), 1, "the broadcast may still write");
    worker.kill("the test is over");
    assert_eq!(ring.free(), 2);
    tokio::time::timeout(AMPLE, worker.ended()).await.unwrap();
}

#[tokio::test]
async fn dropping_the_last_handle_ends_the_worker() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let worker = start(&format!("echo $$ >{0}.new; mv {0}.new {0}; exec sleep 60", pid.display()));
    let read = || std::fs::read_to_string(&pid).ok();
    let pid = until(read).await;
    drop(worker);
    let process = format!("/proc/{}", pid.trim());
    until(|| (!std::path::Path::new(&process).exists()).then_some(())).await;
}

async fn until<T>(mut found: impl FnMut() -> Option<T>) -> T {
    let looks = async {
        loop {
            if let Some(found) = found() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(AMPLE, looks).await.unwrap()
}
