//! A simulated engine after its HTTP front: requests, pauses, caches and loads, one at a time as in an engine core.
//!
//! Decides when a request may take its next token, the effect of a pause on it, when a cache can be emptied, and what remains after a
//! failed load. The rules are those of vLLM 0.32 (`v1/engine/core.py`) and SGLang 0.5.23 (`srt/managers/scheduler.py`), where they differ
//! by [`Kind`].

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::faults::{Faults, LoadFault};
use super::model::{Generated, Token, token};
use super::served::{LoadError, Served};
use super::tensors::Taken;

/// Weights without their last step compute something else than the same weights after it.
const UNFINISHED: u128 = 1 << 100;

/// Which engine's rules hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Vllm,
    Sglang,
    Lmdeploy,
    Fastdeploy,
}

/// Who may take tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    Running,
    /// Requests that have begun.
    New,
    All,
}

/// What a failed load left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leftover {
    Nothing,
    /// Layers are taken apart; no parameter was replaced yet.
    Opened,
    /// Some parameters are new, others are buffered.
    Halfway,
    /// A buffered tensor fits nowhere and is tried again with each load.
    Poisoned,
}

#[derive(Debug, Default)]
struct Request {
    begun: bool,
    aborted: bool,
    /// Digest of the weights that the KV of its prompt was computed with.
    cache: Option<u128>,
}

pub(super) struct State {
    pub(super) served: Served,
    /// The draft model, where there is one. No answer depends on it.
    pub(super) draft: Option<Served>,
    pub(super) faults: Faults,
    pub(super) version: String,
    pub(super) pause: Pause,
    /// How deeply vLLM sleeps (0 awake, 1 weights offloaded, 2 all discarded), and how often it fell asleep.
    pub(super) sleep: (u8, u64),
    /// The core broke down; the server will end.
    pub(super) dead: bool,
    /// Unread replies of the second worker, for an executor that loses its place in them.
    pub(super) late: Option<VecDeque<Result<(), String>>>,
    /// Calls so far, `METHOD /path?query`, the simulator's own left out.
    pub(super) calls: Vec<String>,
    digest: u128,
    leftover: Leftover,
    /// Tensors that were handed over since the last step of an update, which is still to come.
    taken: usize,
    requests: BTreeMap<u64, Request>,
    next: u64,
    prefixes: HashMap<String, u128>,
}

pub(super) struct Core {
    kind: Kind,
    state: Mutex<State>,
    /// Held by whatever the core does at the moment.
    turn: tokio::sync::Mutex<()>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
pub(super) struct Dead;

impl Core {
    pub(super) fn new(kind: Kind, served: Served, draft: Option<Served>, faults: Faults) -> Self {
        let digest = served.digest();
        let (version, pause, leftover) = ("default".to_owned(), Pause::Running, Leftover::Nothing);
        let (calls, requests, prefixes) = (Vec::new(), BTreeMap::new(), HashMap::new());
        let (sleep, dead, late, taken, next) = ((0, 0), false, None, 0, 0);
        let state =
            State { served, draft, faults, version, pause, sleep, dead, late, calls, digest, leftover, taken, requests, next, prefixes };
        Self { kind, state: Mutex::new(state), turn: tokio::sync::Mutex::default(), changed: watch::Sender::new(()) }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until the core has nothing else to do, and occupies it.
    pub(super) async fn turn(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, Dead> {
        let turn = self.turn.lock().await;
        if self.state().dead { Err(Dead) } else { Ok(turn) }
    }

    /// Generates up to `length` tokens; waits as long as it is paused.
    pub(super) async fn generate(self: &Arc<Self>, prompt: &str, length: usize) -> Result<Generated, Dead> {
        let mut changed = self.changed.subscribe();
        let admitted = Admitted::new(self);
        let mut tokens = Vec::new();
        while tokens.len() < length {
            changed.borrow_and_update();
            let step = {
                let _turn = self.turn().await?;
                self.state().step(admitted.id, prompt, tokens.len())
            };
            match step {
                Step::Token(token) => tokens.push(token),
                Step::Wait => {
                    if changed.changed().await.is_err() {
                        return Err(Dead);
                    }
                    continue;
                }
                Step::Aborted => return Ok(Generated { tokens, aborted: true }),
                Step::Broken => {
                    self.change(|state| state.dead = true);
                    return Err(Dead);
                }
            }
            let token_ms = self.state().faults.token_ms;
            if token_ms > 0 {
                tokio::time::sleep(Duration::from_millis(token_ms)).await;
            }
        }
        Ok(Generated { tokens, aborted: false })
    }

    /// Changes the state and wakes all waiting tasks.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state());
        self.changed.send_replace(());
        result
    }

    /// Ends every request that is in the engine now.
    pub(super) fn abort_all(&self) {
        self.change(|state| state.requests.values_mut().for_each(|request| request.aborted = true));
    }

    /// Returns when no request that has begun is left.
    pub(super) async fn drained(&self) -> Result<(), Dead> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            {
                let state = self.state();
                if state.dead {
                    return Err(Dead);
                }
                if !state.requests.values().any(|request| request.begun) {
                    return Ok(());
                }
            }
            if changed.changed().await.is_err() {
                return Err(Dead);
            }
        }
    }

    /// Recomputes the KV of every request before its next token.
    pub(super) fn preempt_all(&self) {
        self.change(|state| {
            for request in state.requests.values_mut() {
                request.begun = false;
                request.cache = None;
            }
        });
    }

    /// Empties the cache; refused while a request that has begun holds a part of it.
    pub(super) fn reset_cache(&self) -> bool {
        let mut state = self.state();
        let held = state.requests.values().any(|request| request.begun);
        if !held {
            state.prefixes.clear();
        }
        !held
    }

    /// Loads all weights from a directory. The caller occupies the core.
    pub(super) async fn load(&self, directory: PathBuf) -> Result<(), LoadError> {
        let (mut served, fault, wait) = {
            let mut state = self.state();
            match state.leftover {
                Leftover::Poisoned => return Err(LoadError::Misfit("a buffered tensor does not fit".to_owned())),
                Leftover::Halfway if self.kind == Kind::Vllm => {
                    state.leftover = Leftover::Poisoned;
                    return Err(LoadError::Misfit("'Parameter' object has no attribute 'weight_loader'".to_owned()));
                }
                Leftover::Nothing | Leftover::Opened | Leftover::Halfway => {}
            }
            let fault = state.faults.load;
            if fault == Some(LoadFault::FailHalfwayOnce) {
                state.faults.load = None;
            }
            (state.served.clone(), fault, state.faults.load_ms)
        };
        if wait > 0 {
            tokio::time::sleep(Duration::from_millis(wait)).await;
        }
        let unknown_is_error = self.kind == Kind::Vllm;
        let read = tokio::task::spawn_blocking(move || {
            let loaded = served.load(&directory, fault, unknown_is_error);
            (served, loaded)
        });
        let (served, loaded) = read.await.map_err(|error| LoadError::Unreadable(error.to_string()))?;
        self.change(|state| {
            state.digest = served.digest();
            state.served = served;
            state.leftover = match &loaded {
                Ok(()) => Leftover::Nothing,
                // Only vLLM takes layers apart before it looks at the files.
                Err(LoadError::Unreadable(_)) => {
                    if self.kind == Kind::Vllm {
                        Leftover::Opened
                    } else {
                        Leftover::Nothing
                    }
                }
                Err(LoadError::Halfway(_) | LoadError::Unknown(_)) => Leftover::Halfway,
                Err(LoadError::Misfit(_)) => Leftover::Poisoned,
            };
        });
        loaded
    }

    /// Replaces some parameters by what was handed over, as one of an engine's workers does. The caller is that worker; generation is not
    /// stopped here.
    pub(super) async fn take(&self, tensors: Vec<Taken>) -> Result<(), String> {
        let wait = self.state().faults.load_ms;
        if wait > 0 {
            tokio::time::sleep(Duration::from_millis(wait)).await;
        }
        self.change(|state| {
            let fault = state.faults.load;
            for tensor in tensors {
                let half = state.served.tensors().len() / 2;
                if state.taken == half && matches!(fault, Some(LoadFault::FailHalfway | LoadFault::FailHalfwayOnce)) {
                    if fault == Some(LoadFault::FailHalfwayOnce) {
                        state.faults.load = None;
                    }
                    return Err("torch.OutOfMemoryError: CUDA out of memory.".to_owned());
                }
                state.served.take(tensor, fault, state.taken == 0)?;
                state.taken += 1;
            }
            state.digest = state.served.digest() ^ UNFINISHED;
            Ok(())
        })
    }

    /// Replaces some parameters of the draft model by what was handed over.
    pub(super) fn take_draft(&self, tensors: Vec<Taken>) -> Result<(), String> {
        self.change(|state| {
            let draft = state.draft.as_mut().ok_or("there is no draft model")?;
            tensors.into_iter().try_for_each(|tensor| draft.take(tensor, None, false))
        })
    }

    /// Changes the weights themselves, and what is computed from them.
    pub(super) fn change_served<T>(&self, change: impl FnOnce(&mut Served) -> T) -> T {
        self.change(|state| {
            let changed = change(&mut state.served);
            state.digest = state.served.digest();
            changed
        })
    }

    /// The last step of an update: what was handed over is served as it is.
    pub(super) fn finalise(&self) {
        self.change(|state| {
            state.taken = 0;
            if state.faults.load != Some(LoadFault::SwallowFinish) {
                state.digest = state.served.digest();
            }
        });
    }

    /// The start of a session that reloads layer by layer: nothing can be computed until they are put together.
    pub(super) fn take_apart(&self) {
        self.change(|state| (state.taken, state.leftover) = (0, Leftover::Opened));
    }

    /// The end of such a session, whatever it brought.
    pub(super) fn put_together(&self) {
        self.change(|state| state.leftover = Leftover::Nothing);
        self.finalise();
    }

    /// vLLM's reload of an empty list: takes back what a failed load left open, unless a tensor that fits nowhere is in the way.
    pub(super) fn load_nothing(&self) -> Result<(), LoadError> {
        let mut state = self.state();
        if state.leftover == Leftover::Poisoned {
            return Err(LoadError::Misfit("a buffered tensor does not fit".to_owned()));
        }
        state.leftover = Leftover::Nothing;
        Ok(())
    }
}

enum Step {
    Token(Token),
    Wait,
    Aborted,
    Broken,
}

impl State {
    fn step(&mut self, id: u64, prompt: &str, position: usize) -> Step {
        let Some(request) = self.requests.get_mut(&id) else { return Step::Aborted };
        if request.aborted {
            return Step::Aborted;
        }
        match self.pause {
            Pause::All => return Step::Wait,
            Pause::New if !request.begun => return Step::Wait,
            Pause::New | Pause::Running => {}
        }
        // Layers that a failed load took apart hold no memory: computing with them ends the core.
        if self.leftover != Leftover::Nothing {
            return Step::Broken;
        }
        request.begun = true;
        let fresh = self.digest;
        let cache = *request.cache.get_or_insert_with(|| *self.prefixes.entry(prompt.to_owned()).or_insert(fresh));
        Step::Token(token(self.digest, cache, self.served.computes_nan(), prompt, position))
    }

    pub(super) fn requests(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn digest(&self) -> u128 {
        self.digest
    }
}

/// A place in the engine, given back when the request ends or its client goes away.
struct Admitted {
    core: Arc<Core>,
    id: u64,
}

impl Admitted {
    fn new(core: &Arc<Core>) -> Self {
        let id = core.change(|state| {
            let id = state.next;
            state.next += 1;
            state.requests.insert(id, Request::default());
            id
        });
        Self { core: Arc::clone(core), id }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.core.change(|state| state.requests.remove(&self.id));
    }
}
