//! The pre-flight of an epoch: measures the edges of the planned chain that are not known yet, and keeps the order that follows.
//!
//! It runs while no attempt runs: a publish or a feeding ends it, and it goes on afterwards. Nothing waits for it. What it found is a fact
//! of this agent; who is left out for it is the coordinator's matter. Over NCCL nothing is measured, because there are no edges.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::{Instant, sleep};

use super::Leader;
use super::calls::Calls;
use super::probe::hello;
use crate::edge::measure;
use crate::group::Epoch;
use crate::locks::lock;
use weightsync_core::plan::{Edges, Next, arrange};
use weightsync_core::protocol::{
    Arrangement, ClockAnswer, ClockRequest, Delivery, EdgeOutcome, EdgeReport, EdgeRequest, MOST_EDGES, MemberName, Preflight,
    PreflightReport, UpdateId,
};

/// One edge is measured within this long.
const EDGE: Duration = Duration::from_secs(10);
/// An edge that speaks against a member is measured again after this long: of a member that dies the group hears before.
const AGAIN: Duration = Duration::from_secs(1);
/// How often an edge that speaks against a member is measured again before it is believed.
const DOUBTS: u32 = 2;
/// Progress is shown as often as this: each time costs a write of the object's status.
const SHOW: Duration = Duration::from_secs(1);
/// Round trips of which the shortest counts.
const ROUND_TRIPS: usize = 3;
/// Pairs of nodes that are remembered.
const MOST_KNOWN: usize = 16 << 10;

/// From where to where, over which transport.
type Pair = (String, String, &'static str);

/// What is remembered of edges, from one epoch to the next.
#[derive(Default)]
pub(super) struct Known {
    /// The request that the edges are newer than.
    asked: String,
    pairs: BTreeMap<Pair, EdgeOutcome>,
    /// Those that a member was judged by: they are measured again in the next epoch, if it has that member.
    doubtful: Vec<Pair>,
    order: Vec<MemberName>,
}

/// Edges between members of an epoch.
struct EdgesOf<'a> {
    epoch: &'a Epoch,
    known: &'a Known,
}

impl EdgesOf<'_> {
    fn place(&self, member: &MemberName) -> (Option<&str>, String) {
        let pod = self.epoch.prepared.roster.member(member).and_then(|member| member.pods.first());
        let node = pod.and_then(|pod| pod.node.as_deref());
        let place = node.or(pod.map(|pod| pod.name.as_str())).unwrap_or(&member.0);
        (node, place.to_owned())
    }

    fn pair(&self, from: &MemberName, to: &MemberName) -> Pair {
        (self.place(from).1, self.place(to).1, self.epoch.commit.transport.name())
    }

    fn report(&self, from: &MemberName, to: &MemberName) -> Option<EdgeReport> {
        let (one, other, _) = self.pair(from, to);
        let outcome = self.outcome(from, to)?.clone();
        Some(EdgeReport { from: from.clone(), to: to.clone(), places: (one, other), outcome })
    }
}

impl Edges for EdgesOf<'_> {
    fn outcome(&self, from: &MemberName, to: &MemberName) -> Option<&EdgeOutcome> {
        self.known.pairs.get(&self.pair(from, to))
    }

    fn on_one_node(&self, from: &MemberName, to: &MemberName) -> bool {
        let (one, other) = (self.place(from).0, self.place(to).0);
        one.is_some() && one == other
    }
}

/// The edges that speak against a member: sender and receiver.
fn doubted(me: &MemberName, arrangement: &Arrangement) -> impl Iterator<Item = (MemberName, MemberName)> {
    let poor = arrangement.poor.iter().map(|poor| (poor.from.clone(), poor.member.clone()));
    let first = arrangement.order.first().filter(|_| arrangement.source.is_some());
    poor.chain(first.map(|first| (me.clone(), first.clone())))
}

/// Whether that says more for an edge than what was known.
fn is_better(outcome: &EdgeOutcome, before: &EdgeOutcome) -> bool {
    match (outcome, before) {
        (EdgeOutcome::Verified(figures), EdgeOutcome::Verified(before)) => figures.rate() > before.rate(),
        (EdgeOutcome::Verified(_), _) => true,
        _ => false,
    }
}

/// Counts an attempt as long as it lives.
pub(super) struct Busy<'a>(&'a tokio::sync::watch::Sender<u32>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|attempts| *attempts = attempts.saturating_sub(1));
    }
}

/// The clock of this host, in ms since 1970.
pub fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Whether this agent leads a chain whose edges are to be measured.
fn measures(epoch: &Epoch) -> bool {
    let policy = &epoch.prepared.policy;
    let chain = epoch.communicator().is_none() && epoch.engines().is_none();
    let leads = epoch.has_source() && epoch.prober() == Some(epoch.me());
    policy.transport.preflight == Preflight::Auto && policy.delivery == Delivery::Agent && chain && leads
}

impl Leader {
    /// An attempt begins: measurements end.
    pub(super) fn busy(&self) -> Busy<'_> {
        self.busy.send_modify(|attempts| *attempts = attempts.saturating_add(1));
        Busy(&self.busy)
    }

    /// The order of chains by what was measured; members that it does not name were not measured.
    pub(super) fn measured_order(&self) -> Vec<MemberName> {
        lock(&self.known).order.clone()
    }

    /// Measures what each epoch needs, for ever. May be dropped at any time: what is known is kept.
    pub async fn preflights(&self) {
        let mut standing = self.core.standing();
        loop {
            let epoch = standing.borrow_and_update().committed().cloned();
            if let Some(epoch) = epoch.filter(|epoch| measures(epoch)) {
                tokio::select! {
                    () = self.preflight(&epoch) => {}
                    changed = standing.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return,
                    },
                }
            }
            if standing.changed().await.is_err() {
                return;
            }
        }
    }

    async fn preflight(&self, epoch: &Arc<Epoch>) {
        let rollouts = epoch.rollouts();
        let asked = &epoch.prepared.policy.transport.preflight_asked;
        let shown = self.core.events().state().preflight.clone().filter(|report| &report.id == epoch.id());
        if shown.as_ref().is_some_and(|report| report.done) {
            return;
        }
        let (mut measured, mut took_ms) = shown.map_or((0, 0), |report| (report.measured, report.took_ms));
        if measured == 0 {
            let mut known = lock(&self.known);
            let doubtful = std::mem::take(&mut known.doubtful);
            known.pairs.retain(|pair, _| !doubtful.contains(pair));
            if known.asked != *asked || known.pairs.len() > MOST_KNOWN {
                known.asked.clone_from(asked);
                known.pairs.clear();
            }
        }
        let mut shown = Instant::now();
        let mut again: BTreeMap<(MemberName, MemberName), u32> = BTreeMap::new();
        loop {
            let next = {
                let known = lock(&self.known);
                arrange(epoch.me(), &rollouts, &EdgesOf { epoch, known: &known })
            };
            let (from, to) = match next {
                Next::Measure(from, to) => (from, to),
                Next::Arranged(arrangement) => {
                    let doubted = doubted(epoch.me(), &arrangement).find(|edge| again.get(edge).is_none_or(|times| *times < DOUBTS));
                    let Some(edge) = doubted else {
                        self.arranged(epoch, arrangement, (measured, took_ms));
                        return;
                    };
                    // A moment of load must not cost a member the group: the best of several figures counts.
                    sleep(AGAIN).await;
                    *again.entry(edge.clone()).or_default() += 1;
                    edge
                }
            };
            self.idle().await;
            let begun = Instant::now();
            let outcome = tokio::select! {
                outcome = self.edge(epoch, &from, &to) => outcome,
                () = self.begun() => continue,
            };
            took_ms += millis(begun.elapsed());
            measured += 1;
            tracing::debug!(%from, %to, ?outcome, "an edge was measured");
            let mut known = lock(&self.known);
            let pair = EdgesOf { epoch, known: &known }.pair(&from, &to);
            if known.pairs.get(&pair).is_none_or(|before| is_better(&outcome, before)) {
                known.pairs.insert(pair, outcome);
            }
            let edges = EdgesOf { epoch, known: &known }.report(&from, &to).into_iter().collect();
            drop(known);
            if shown.elapsed() >= SHOW {
                shown = Instant::now();
                self.show_preflight(epoch, false, (measured, took_ms), (edges, Arrangement::default()));
            }
        }
    }

    /// Keeps the order and reports what it follows from.
    fn arranged(&self, epoch: &Epoch, arrangement: Arrangement, spent: (u32, u64)) {
        let (me, order) = (epoch.me(), &arrangement.order);
        let judged: Vec<(MemberName, MemberName)> = doubted(me, &arrangement).collect();
        let mut known = lock(&self.known);
        known.order.clone_from(order);
        let edges = EdgesOf { epoch, known: &known };
        let chain = std::iter::once(me).chain(order).zip(order).map(|(from, to)| (from.clone(), to.clone()));
        let others = chain.filter(|edge| !judged.contains(edge));
        let shown = judged.iter().cloned().chain(others).filter_map(|(from, to)| edges.report(&from, &to)).take(MOST_EDGES).collect();
        // A member that was judged by an edge is measured again when it comes back.
        let doubtful = order.iter().filter(|member| arrangement.poor.iter().any(|poor| &poor.member == *member));
        let into: Vec<String> = doubtful.map(|member| edges.place(member).1).collect();
        let source = arrangement.source.is_some().then(|| edges.place(me).1);
        let at_fault = |pair: &&Pair| into.contains(&pair.1) || source.as_ref() == Some(&pair.0);
        known.doubtful = known.pairs.keys().filter(at_fault).cloned().collect();
        drop(known);
        if !arrangement.moved.is_empty() || !judged.is_empty() {
            tracing::warn!(epoch = %epoch.id(), order = ?arrangement.order, poor = ?arrangement.poor, "the order of the chain follows its edges");
        }
        self.show_preflight(epoch, true, spent, (shown, arrangement));
    }

    fn show_preflight(&self, epoch: &Epoch, done: bool, (measured, took_ms): (u32, u64), found: (Vec<EdgeReport>, Arrangement)) {
        let (edges, arrangement) = found;
        let report = PreflightReport {
            id: epoch.id().clone(),
            transport: epoch.commit.transport.name().to_owned(),
            asked: epoch.prepared.policy.transport.preflight_asked.clone(),
            done,
            measured,
            took_ms,
            edges,
            arrangement,
        };
        self.core.set_facts(|facts| facts.preflight = Some(Box::new(report)));
    }

    /// Waits until no attempt runs.
    async fn idle(&self) {
        let _ = self.busy.subscribe().wait_for(|attempts| *attempts == 0).await;
    }

    /// Waits until an attempt runs.
    async fn begun(&self) {
        let _ = self.busy.subscribe().wait_for(|attempts| *attempts > 0).await;
    }

    /// Measures an edge from wherever it begins.
    async fn edge(&self, epoch: &Arc<Epoch>, from: &MemberName, to: &MemberName) -> EdgeOutcome {
        if from == epoch.me() {
            return self.measure(epoch, to, EDGE).await;
        }
        let calls = Calls::new(self.client.clone(), epoch.clone());
        let request = EdgeRequest { id: epoch.id().clone(), to: to.clone(), deadline_ms: millis(EDGE) };
        let answer = calls.ask(from, &request, EDGE + EdgeRequest::WITHIN).await;
        answer.unwrap_or_else(|error| EdgeOutcome::Unmeasured { cause: error.to_string() })
    }

    /// Measures the edge from this member to another one.
    pub async fn measure(&self, epoch: &Arc<Epoch>, to: &MemberName, within: Duration) -> EdgeOutcome {
        let calls = Calls::new(self.client.clone(), epoch.clone());
        let update = UpdateId { epoch: epoch.id().clone(), version: 0, attempt: 0 };
        let opening = hello(epoch, &calls, std::slice::from_ref(to), &update, true, self.read_by(epoch));
        let Some((mut hello, address)) = opening else {
            return EdgeOutcome::Unmeasured { cause: format!("the epoch has no address of {to}") };
        };
        hello.preflight = true;
        let outcome = measure(self.transport.as_ref(), &hello, &address, within).await;
        let EdgeOutcome::Verified(mut figures) = outcome else { return outcome };
        for _ in 0..ROUND_TRIPS {
            let (begun, sent) = (Instant::now(), now_ms());
            let Ok(ClockAnswer { now_ms }) = calls.ask(to, &ClockRequest {}, ClockRequest::WITHIN).await else { break };
            let round_trip = begun.elapsed();
            let us = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
            if figures.round_trip_us.is_none_or(|shortest| us < shortest) {
                figures.round_trip_us = Some(us);
                let middle = sent.saturating_add(i64::try_from(round_trip.as_millis() / 2).unwrap_or(0));
                figures.clock_ms = Some(now_ms.saturating_sub(middle));
            }
        }
        EdgeOutcome::Verified(figures)
    }
}
