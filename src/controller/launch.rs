//! Adds agents to running pods as ephemeral containers, if the object requests that, and reports pods that should have been injected.
//! `ephemeral` decides; this file acts and reports.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::calls::ApiError;
use super::decide::{Decided, target_container};
use super::ephemeral::{Need, Recipe, addresses, container, key_not_allowed, launches, need, uninjected, unwrapped};
use super::events::ObjectEvents;
use super::pods::Pods;
use crate::api::{Launch, SecretKey, WeightSync};
use weightsync_coordinator::{CoordinatorEvent, EventSink, ProvenPod, SingleUseTokens};
use weightsync_core::membership::MembershipView;
use weightsync_core::plan::Candidate;
use weightsync_core::protocol::{MemberName, PodRef, Reason, Role};

/// Settings of ephemeral agents. They come from the chart and are the same for all objects: an object cannot choose an image.
pub(super) struct Launcher {
    pub(super) image: String,
    pub(super) pull_policy: String,
    pub(super) controller_url: String,
    pub(super) controller_ca: String,
    pub(super) tokens: SingleUseTokens,
    pub(super) recent: Recent,
}

/// How long the pod cache may lag before it counts again.
const LAG: Duration = Duration::from_secs(60);

/// Agents that were added to a pod and are not in the cache yet. A container name can be added only once, so a second try from a stale
/// cache fails without harm.
#[derive(Default)]
pub(super) struct Recent {
    launches: Mutex<HashMap<String, (usize, Instant)>>,
    /// By pod UID: the refusal that an Event already reported.
    refusals: Mutex<HashMap<String, String>>,
}

/// Pods whose refusals are remembered; beyond that an Event may repeat.
const REFUSALS: usize = 4096;

impl Recent {
    fn note(&self, pod: &Pod) {
        let mut recent = self.launches.lock();
        recent.retain(|_, (_, at)| at.elapsed() < LAG);
        recent.insert(pod.uid().unwrap_or_default(), (launches(pod) + 1, Instant::now()));
    }

    /// Whether no Event reported this refusal yet.
    fn is_first_refusal(&self, pod: &Pod, message: &str) -> bool {
        let mut refusals = self.refusals.lock();
        if refusals.len() >= REFUSALS {
            refusals.clear();
        }
        refusals.insert(pod.uid().unwrap_or_default(), message.to_owned()).as_deref() != Some(message)
    }

    /// Whether the cache shows every agent that was added to the pod.
    fn is_shown(&self, pod: &Pod) -> bool {
        let recent = self.launches.lock();
        let known = pod.uid().and_then(|uid| recent.get(&uid).copied());
        known.is_none_or(|(count, at)| launches(pod) >= count || at.elapsed() >= LAG)
    }
}

#[derive(Debug, Default)]
pub(super) struct Launched {
    /// Reconcile again after this time.
    pub(super) again: Option<Duration>,
    pub(super) problems: Vec<(Reason, String)>,
}

/// The messages for those of these pods that admission should have given an agent, each once.
fn without_agent<'a>(
    heads: impl Iterator<Item = &'a PodRef>,
    pods: &[Arc<Pod>],
    message: fn(&Pod) -> Option<String>,
) -> Vec<(Reason, String)> {
    let found = heads.filter_map(|head| pods.iter().find(|pod| pod.uid().as_deref() == Some(&head.uid)));
    let mut problems: Vec<_> = found.filter_map(|pod| message(pod)).map(|message| (Reason::AgentMissing, message)).collect();
    problems.dedup();
    problems
}

impl Launcher {
    pub(super) async fn launch(
        &self,
        object: &WeightSync,
        decided: &Decided,
        pods: &[Arc<Pod>],
        writes: &Pods,
        events: &ObjectEvents,
        view: &MembershipView,
    ) -> Result<Launched, ApiError> {
        let mut launched = Launched::default();
        if object.spec.suspend {
            return Ok(launched);
        }
        match object.spec.agent.launch {
            Launch::Ephemeral => {}
            // Only admission can wrap a pod. The pod may take part in another way, so this is reported and nothing is refused.
            Launch::Wrap => {
                let heads = decided.members.0.iter().flat_map(|candidate| &candidate.pods);
                return Ok(Launched { again: None, problems: without_agent(heads, pods, unwrapped) });
            }
            // So can only admission add a sidecar. A pod from which an agent has announced itself got one in another way.
            Launch::Sidecar => {
                let silent = view.members.iter().filter(|member| member.incarnation.is_none() && member.reason == Reason::AgentMissing);
                let heads = silent.filter_map(|member| member.pods.first());
                return Ok(Launched { again: None, problems: without_agent(heads, pods, uninjected) });
            }
            Launch::External => return Ok(launched),
        }
        let mut last = None;
        for candidate in &decided.members.0 {
            let Some(head) = candidate.pods.first() else { continue };
            // Engines on several ports of one pod share one agent.
            if last.replace(&head.uid) == Some(&head.uid) {
                continue;
            }
            let Some(pod) = pods.iter().find(|pod| pod.uid().as_deref() == Some(&head.uid)) else { continue };
            let Some(target) = target_container(object, pod) else { continue };
            if !self.recent.is_shown(pod) {
                continue;
            }
            match need(pod, &target, Timestamp::now()) {
                Need::Nothing => {}
                Need::Wait(wait) => launched.again = Some(launched.again.map_or(wait, |again| again.min(wait))),
                Need::Exhausted(message) => launched.problems.push((Reason::AgentLaunchFailed, message)),
                Need::Stuck(message) => launched.problems.push((Reason::AgentLaunchFailed, format!("pod {}: {message}", head.name))),
                Need::Launch(name) => {
                    if let Some(message) = key_not_allowed(pod, api_key(object, &candidate.name)) {
                        if self.recent.is_first_refusal(pod, &message) {
                            tell(events, Reason::AgentLaunchFailed, &candidate.name, message.clone(), true);
                        }
                        launched.problems.push((Reason::AgentLaunchFailed, message));
                        continue;
                    }
                    let recipe = self.recipe(object, candidate, pod, &target, name);
                    let message = format!("added {} for container {target}", recipe.name);
                    match writes.add_ephemeral(pod, &container(pod, recipe)).await {
                        Ok(()) => {
                            self.recent.note(pod);
                            tell(events, Reason::AgentLaunched, &candidate.name, message, false);
                        }
                        Err(error) => {
                            tell(events, Reason::AgentLaunchFailed, &candidate.name, error.to_string(), true);
                            launched.problems.push((Reason::AgentLaunchFailed, error.to_string()));
                            launched.again = Some(launched.again.map_or(RETRY, |again| again.min(RETRY)));
                        }
                    }
                }
            }
        }
        Ok(launched)
    }

    fn recipe<'a>(&'a self, object: &'a WeightSync, candidate: &Candidate, pod: &Pod, target: &'a str, name: String) -> Recipe<'a> {
        let proven =
            ProvenPod { namespace: pod.namespace().unwrap_or_default(), pod: pod.name_any(), pod_uid: pod.uid().unwrap_or_default() };
        Recipe {
            name,
            target,
            image: &self.image,
            pull_policy: &self.pull_policy,
            role: if candidate.role == Role::Source { "trainer" } else { "rollout" },
            controller_url: &self.controller_url,
            controller_ca: &self.controller_ca,
            token: self.tokens.mint(proven, addresses(pod)),
            api_key: api_key(object, &candidate.name),
        }
    }
}

/// A refused patch is tried again after this time; the reconcile itself continues.
const RETRY: Duration = Duration::from_secs(10);

fn api_key<'a>(object: &'a WeightSync, member: &MemberName) -> Option<&'a SecretKey> {
    let (pool, _) = member.0.split_once('/')?;
    object.spec.rollouts.iter().find(|candidate| candidate.name == pool)?.engine.api_key_secret_ref.as_ref()
}

fn tell(events: &ObjectEvents, reason: Reason, member: &MemberName, message: String, warning: bool) {
    events.publish(CoordinatorEvent { reason, message, member: Some(member.clone()), warning });
}
