//! Locks of this crate. Decides that a value is whole although the holder of its lock panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder panicked guards values that are whole: every change under it is one assignment or one call of a state machine.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
