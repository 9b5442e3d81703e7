//! The book of requests that a worker has not answered: who waits, until when, and what must not be given up meanwhile.
//!
//! Decides which request is overdue. It never speaks to the worker.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::held::Held;
use super::{GRACE, WorkerError};
use weightsync_core::protocol::worker::{WorkerAnswer, WorkerFault, WorkerFaultCode, WorkerReply};

pub(super) type Answer = oneshot::Sender<Result<WorkerAnswer, WorkerError>>;

struct Entry {
    what: &'static str,
    within: Duration,
    overdue: Instant,
    answer: Answer,
    /// Kept until the answer, also when no one waits for it any more.
    held: Vec<Held>,
}

#[derive(Default)]
struct Book {
    next: u64,
    entries: HashMap<u64, Entry>,
    /// How the worker ended; nothing is entered any more.
    gone: Option<String>,
}

#[derive(Default)]
pub(super) struct Pending(Mutex<Book>);

impl Pending {
    /// Enters a request and gives its number; an error when the worker is gone.
    pub(super) fn enter(&self, what: &'static str, within: Duration, held: Vec<Held>, answer: Answer) -> Result<u64, WorkerError> {
        let mut book = self.0.lock();
        if let Some(cause) = &book.gone {
            return Err(WorkerError::Gone { cause: cause.clone() });
        }
        book.next += 1;
        let id = book.next;
        book.entries.insert(id, Entry { what, within, overdue: Instant::now() + within + GRACE, answer, held });
        Ok(id)
    }

    pub(super) fn answer(&self, reply: WorkerReply) {
        let Some(entry) = self.0.lock().entries.remove(&reply.id) else {
            tracing::warn!(id = reply.id, "the GPU worker answered a request that is not under way");
            return;
        };
        let what = entry.what;
        // Who hears the answer finds the slot free.
        drop(entry.held);
        // No one may be waiting any more.
        let _ = entry.answer.send(reply.result.map_err(|fault: WorkerFault| WorkerError::Fault { what, fault }));
    }

    /// A request that could not be sent.
    pub(super) fn refuse(&self, id: u64, cause: &str) {
        if let Some(entry) = self.0.lock().entries.remove(&id) {
            let fault = WorkerFault { code: WorkerFaultCode::Invalid, message: cause.to_owned() };
            let _ = entry.answer.send(Err(WorkerError::Fault { what: entry.what, fault }));
        }
    }

    /// Why the worker is taken for hanging, if it is.
    pub(super) fn overdue(&self) -> Option<String> {
        let now = Instant::now();
        let book = self.0.lock();
        let late = book.entries.values().filter(|entry| entry.overdue <= now).min_by_key(|entry| entry.overdue)?;
        Some(format!("killed: it did not {} in {:?}, nor say so", late.what, late.within))
    }

    /// The worker ended: everything under way fails with the cause, and so does everything later. The first cause stays.
    pub(super) fn gone(&self, cause: &str) {
        let mut book = self.0.lock();
        let cause = book.gone.get_or_insert_with(|| cause.to_owned()).clone();
        let entries = std::mem::take(&mut book.entries);
        drop(book);
        for entry in entries.into_values() {
            drop(entry.held);
            let _ = entry.answer.send(Err(WorkerError::Gone { cause: cause.clone() }));
        }
    }

    pub(super) fn cause(&self) -> Option<String> {
        self.0.lock().gone.clone()
    }
}
