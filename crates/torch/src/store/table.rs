//! What a store holds and who waits for it. Decides the reply to each request, whom it wakes, and what is too much; knows no socket.
//!
//! Answers as torch's servers do, also where they are odd: a compare-and-set of a key that is not there answers the expected value, a read
//! of one answers nothing, and a key that is deleted under a waiting client still counts for it.

use std::collections::{HashMap, HashSet, VecDeque};

use super::wire::{NOT_READY, READY, Request, STOP_WAITING, WAIT_CANCELED, write_bytes};
use super::{HELLO, MAX_BYTES, MAX_ENTRIES};

pub(super) type ClientId = u64;

/// What an entry costs besides its bytes.
const ENTRY: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the first request is not torch's greeting")]
    NoGreeting,
    #[error("a second greeting")]
    SecondGreeting,
    #[error("the store is full")]
    Full,
    #[error("a number is added to what is no number, or to one that is too large")]
    NoNumber,
}

#[derive(Default)]
pub(super) struct Table {
    values: HashMap<Vec<u8>, Vec<u8>>,
    queues: HashMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// Who waits for a key, in the order in which they came.
    waiting: HashMap<Vec<u8>, VecDeque<ClientId>>,
    /// How many keys each waiting client still misses, and which it asked for.
    missing: HashMap<ClientId, (usize, Vec<Vec<u8>>)>,
    greeted: HashSet<ClientId>,
    /// Clients that added to [`HELLO`] and are still there.
    hello: HashSet<ClientId>,
    /// Who asked for a key that the server's owner watches.
    watched: HashMap<Vec<u8>, HashSet<ClientId>>,
    entries: usize,
    bytes: usize,
}

impl Table {
    /// Sets a value on behalf of the server's owner, who wants to know who asks for it. Gives whom it wakes.
    pub(super) fn set_own(&mut self, key: &[u8], value: &[u8]) -> Result<Vec<ClientId>, Refusal> {
        self.put(key, value.to_vec())?;
        let waiting = self.waiting.get(key).into_iter().flatten().copied().collect();
        self.watched.insert(key.to_vec(), waiting);
        Ok(self.wake_all(key))
    }

    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// Whether a client sent torch's first message.
    pub(super) fn greeted(&self, client: ClientId) -> bool {
        self.greeted.contains(&client)
    }

    /// Ranks that connected and announced themselves.
    pub(super) fn hellos(&self) -> usize {
        self.hello.len()
    }

    /// Clients that asked for a key of the owner's.
    pub(super) fn readers(&self, key: &[u8]) -> usize {
        self.watched.get(key).map_or(0, HashSet::len)
    }

    pub(super) fn leave(&mut self, client: ClientId) {
        self.forget_wait(client);
        self.greeted.remove(&client);
        self.hello.remove(&client);
    }

    /// Executes a request; appends the reply to `reply`, and returns the clients whose wait ended.
    pub(super) fn apply(&mut self, client: ClientId, request: &Request<'_>, reply: &mut Vec<u8>) -> Result<Vec<ClientId>, Refusal> {
        if !self.greeted.contains(&client) {
            let Request::Validate(super::wire::MAGIC) = request else { return Err(Refusal::NoGreeting) };
            self.greeted.insert(client);
            return Ok(Vec::new());
        }
        let mut woken = Vec::new();
        match request {
            Request::Validate(_) => return Err(Refusal::SecondGreeting),
            Request::Ping(nonce) => reply.extend(nonce.to_le_bytes()),
            Request::Set(key, value) => {
                self.put(key, value.to_vec())?;
                woken = self.wake_all(key);
            }
            Request::CompareSet(key, expected, desired) => {
                let answer: &[u8] = match self.values.get(*key) {
                    None if expected.is_empty() => desired,
                    None => expected,
                    Some(value) if value == expected => desired,
                    Some(value) => value,
                };
                write_bytes(answer, reply);
                if self.values.get(*key).map_or(expected.is_empty(), |value| value == expected) {
                    self.put(key, desired.to_vec())?;
                    woken = self.wake_all(key);
                }
            }
            Request::Get(key) => {
                self.note_reader(key, client);
                write_bytes(self.get(key).unwrap_or_default(), reply);
            }
            Request::Add(key, delta) => {
                reply.extend(self.add(key, *delta)?.to_le_bytes());
                if *key == HELLO.as_bytes() {
                    self.hello.insert(client);
                }
                woken = self.wake_all(key);
            }
            Request::Check(keys) => reply.push(if keys.iter().all(|key| self.is_there(key)) { READY } else { NOT_READY }),
            Request::Wait(keys) => {
                for key in keys {
                    self.note_reader(key, client);
                }
                if !self.wait(client, keys)? {
                    reply.push(STOP_WAITING);
                }
            }
            Request::CancelWait => {
                self.forget_wait(client);
                reply.push(WAIT_CANCELED);
            }
            Request::CountKeys => reply.extend((self.values.len() as u64).to_le_bytes()),
            Request::Delete(key) => {
                let value = self.values.remove(*key);
                if let Some(value) = &value {
                    self.free(key.len() + value.len());
                }
                reply.extend(i64::from(value.is_some()).to_le_bytes());
            }
            Request::Append(key, value) => {
                let mut joined = self.values.get(*key).cloned().unwrap_or_default();
                joined.extend_from_slice(value);
                self.put(key, joined)?;
                woken = self.wake_all(key);
            }
            Request::MultiGet(keys) => {
                for key in keys {
                    self.note_reader(key, client);
                    write_bytes(self.get(key).unwrap_or_default(), reply);
                    // One key named thousands of times is more than the store itself holds.
                    if reply.len() > MAX_BYTES {
                        return Err(Refusal::Full);
                    }
                }
            }
            Request::MultiSet(items) => {
                for (key, value) in items {
                    self.put(key, value.to_vec())?;
                    woken.extend(self.wake_all(key));
                }
            }
            Request::QueuePush(key, value) => {
                self.take_room(key.len() + value.len())?;
                self.queues.entry(key.to_vec()).or_default().push_back(value.to_vec());
                woken.extend(self.wake_one(key));
            }
            Request::QueuePop(key) => {
                let length = self.queue_length(key);
                reply.extend(length.to_le_bytes());
                if let Some(value) = self.queues.get_mut(*key).and_then(VecDeque::pop_front) {
                    self.free(key.len() + value.len());
                    write_bytes(&value, reply);
                }
                if length <= 1 {
                    self.queues.remove(*key);
                }
            }
            Request::QueueLength(key) => reply.extend(self.queue_length(key).to_le_bytes()),
            Request::ListKeys => {
                reply.extend((self.values.len() as u64).to_le_bytes());
                self.values.keys().for_each(|key| write_bytes(key, reply));
            }
            Request::Barrier(key, world) => {
                if self.add(key, 1)? >= *world {
                    reply.push(STOP_WAITING);
                    woken = self.wake_all(key);
                } else {
                    self.enter_wait(client, vec![key.to_vec()])?;
                }
            }
        }
        Ok(woken)
    }

    fn is_there(&self, key: &[u8]) -> bool {
        self.values.contains_key(key) || self.queue_length(key) > 0
    }

    fn queue_length(&self, key: &[u8]) -> u64 {
        self.queues.get(key).map_or(0, |queue| queue.len() as u64)
    }

    fn note_reader(&mut self, key: &[u8], client: ClientId) {
        if let Some(readers) = self.watched.get_mut(key) {
            readers.insert(client);
        }
    }

    fn take_room(&mut self, bytes: usize) -> Result<(), Refusal> {
        if self.entries >= MAX_ENTRIES || self.bytes + bytes + ENTRY > MAX_BYTES {
            return Err(Refusal::Full);
        }
        self.entries += 1;
        self.bytes += bytes + ENTRY;
        Ok(())
    }

    fn free(&mut self, bytes: usize) {
        self.entries = self.entries.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes + ENTRY);
    }

    /// Sets a value; one that does not fit leaves the old one.
    fn put(&mut self, key: &[u8], value: Vec<u8>) -> Result<(), Refusal> {
        let old = self.values.get(key).map(|old| key.len() + old.len());
        if let Some(bytes) = old {
            self.free(bytes);
        }
        if let Err(full) = self.take_room(key.len() + value.len()) {
            if let Some(bytes) = old {
                self.entries += 1;
                self.bytes += bytes + ENTRY;
            }
            return Err(full);
        }
        self.values.insert(key.to_vec(), value);
        Ok(())
    }

    /// Numbers are kept as decimal text, as torch keeps them: a get of one reads its digits.
    fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, Refusal> {
        let old = match self.values.get(key) {
            None => 0,
            Some(text) => std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok()).ok_or(Refusal::NoNumber)?,
        };
        let sum = i64::checked_add(old, delta).ok_or(Refusal::NoNumber)?;
        self.put(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// Whether the client has to wait. No client of torch waits twice at once; the first wait is forgotten, or its end would be taken for
    /// the second one's.
    fn wait(&mut self, client: ClientId, keys: &[&[u8]]) -> Result<bool, Refusal> {
        self.forget_wait(client);
        let missing: Vec<Vec<u8>> = keys.iter().filter(|key| !self.is_there(key)).map(|key| key.to_vec()).collect();
        if missing.is_empty() {
            return Ok(false);
        }
        self.enter_wait(client, missing)?;
        Ok(true)
    }

    fn enter_wait(&mut self, client: ClientId, missing: Vec<Vec<u8>>) -> Result<(), Refusal> {
        self.forget_wait(client);
        let bytes = missing.iter().map(|key| key.len() + ENTRY).sum::<usize>();
        if self.entries + missing.len() > MAX_ENTRIES || self.bytes + bytes > MAX_BYTES {
            return Err(Refusal::Full);
        }
        self.entries += missing.len();
        self.bytes += bytes;
        for key in &missing {
            self.waiting.entry(key.clone()).or_default().push_back(client);
        }
        self.missing.insert(client, (missing.len(), missing));
        Ok(())
    }

    fn forget_wait(&mut self, client: ClientId) {
        let Some((_, keys)) = self.missing.remove(&client) else { return };
        for key in keys {
            self.free(key.len());
            let Some(waiting) = self.waiting.get_mut(&key) else { continue };
            waiting.retain(|other| *other != client);
            if waiting.is_empty() {
                self.waiting.remove(&key);
            }
        }
    }

    fn wake_all(&mut self, key: &[u8]) -> Vec<ClientId> {
        let waiting = self.waiting.remove(key).unwrap_or_default();
        waiting.into_iter().filter(|client| self.came(*client)).collect()
    }

    /// A value in a queue is for one of those who wait for it.
    fn wake_one(&mut self, key: &[u8]) -> Option<ClientId> {
        loop {
            let client = self.waiting.get_mut(key)?.pop_front()?;
            if self.waiting.get(key).is_some_and(VecDeque::is_empty) {
                self.waiting.remove(key);
            }
            if self.came(client) {
                return Some(client);
            }
        }
    }

    /// One of the keys that a client waits for came: whether it was the last.
    fn came(&mut self, client: ClientId) -> bool {
        let Some((left, _)) = self.missing.get_mut(&client) else { return false };
        *left = left.saturating_sub(1);
        if *left > 0 {
            return false;
        }
        self.forget_wait(client);
        true
    }
}
