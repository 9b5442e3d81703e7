//! Which slots of the ring are whose, and whether what a client says fits that. Pure: no socket, no memory, no clock.
//!
//! Decides whether a filled bucket belongs to the running attempt, to one that is over, or makes no sense. It never lets a slot be written
//! while it is read, and never lets a bucket be left out or come twice.

/// Book of one ring during one publish.
#[derive(Debug)]
pub(super) struct Slots {
    since: u32,
    attempt: u32,
    buckets: u32,
    next: u32,
    ended: bool,
    held: Vec<bool>,
}

/// What to do with a filled slot that makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fill {
    /// It is the next bucket; the slot is held until [`Slots::free`].
    Next,
    /// It belongs to an attempt that is over: the slot may be written again at once.
    Stale,
}

impl Slots {
    /// All slots free, for a stream of `buckets` buckets, from this attempt on.
    pub(super) fn new(attempt: u32, slots: u32, buckets: u32) -> Self {
        Self { since: attempt, attempt, buckets, next: 0, ended: false, held: (0..slots).map(|_| false).collect() }
    }

    /// A client says that a slot holds a bucket.
    pub(super) fn fill(&mut self, attempt: u32, sequence: u32, slot: u32) -> Result<Fill, String> {
        let slots = self.held.len();
        let held = usize::try_from(slot).ok().and_then(|slot| self.held.get_mut(slot));
        let held = held.ok_or_else(|| format!("slot {slot} was filled, the ring has {slots}"))?;
        if *held {
            return Err(format!("slot {slot} was filled while the agent still reads it"));
        }
        if attempt < self.attempt {
            return Ok(Fill::Stale);
        }
        if attempt > self.attempt {
            return Err(format!("a bucket of attempt {attempt} came in attempt {}", self.attempt));
        }
        if self.ended || sequence >= self.buckets {
            return Err(format!("bucket {sequence} came after the end, the version has {} buckets", self.buckets));
        }
        if sequence != self.next {
            return Err(format!("bucket {sequence} came where bucket {} was due", self.next));
        }
        *held = true;
        self.next += 1;
        Ok(Fill::Next)
    }

    /// A client reports that it filled all buckets; `false` if the report is about an ended attempt.
    pub(super) fn end(&mut self, attempt: u32) -> Result<bool, String> {
        if attempt < self.attempt {
            return Ok(false);
        }
        if attempt > self.attempt {
            return Err(format!("the end of attempt {attempt} came in attempt {}", self.attempt));
        }
        if self.ended {
            return Err("the end came twice".into());
        }
        if self.next != self.buckets {
            return Err(format!("the end came after {} of {} buckets", self.next, self.buckets));
        }
        self.ended = true;
        Ok(true)
    }

    /// A slot of the ring that was announced in the attempt `since` is no longer read; returns whether that is the ring that is written
    /// now.
    pub(super) fn free(&mut self, since: u32, slot: u32) -> bool {
        if since != self.since {
            return false;
        }
        if let Some(held) = usize::try_from(slot).ok().and_then(|slot| self.held.get_mut(slot)) {
            *held = false;
        }
        true
    }

    /// Starts another attempt. Slots that are still read stay held.
    pub(super) fn again(&mut self) {
        self.attempt = self.attempt.saturating_add(1);
        self.next = 0;
        self.ended = false;
    }
}

#[cfg(test)]
mod tests;
