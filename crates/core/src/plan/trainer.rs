//! Finds the source among the trainer's pods: the first in order, or none.
//!
//! The source is never guessed. A trainer whose first pod is missing has no source until that pod returns: the next pod holds another rank,
//! and its program does not publish. Several pods without an order, or several with the first index, are reported and refused.

use super::order::{self, Key};
use super::replicas::unfit;
use super::{LeftOut, LeftOutCode, Order, PodFacts, TrainerSpec};
use crate::protocol::{MemberName, Role};

/// The trainer as the plan sees it.
pub(super) struct Trainer<'a> {
    pub(super) sources: Vec<&'a PodFacts>,
    pub(super) followers: Vec<&'a PodFacts>,
    pub(super) left_out: Vec<LeftOut>,
    /// Why there is no source.
    pub(super) missing: Option<String>,
}

/// Member name of a trainer's pod.
pub(super) fn member_name(pod: &str) -> MemberName {
    MemberName(format!("trainer/{pod}"))
}

pub(super) fn find<'a>(spec: &TrainerSpec, pods: &[&'a PodFacts]) -> Trainer<'a> {
    let mut left_out = Vec::new();
    let live: Vec<&'a PodFacts> = pods.iter().copied().filter(|pod| pod.is_live()).collect();
    for pod in pods.iter().filter(|pod| !pod.is_live()) {
        if let Some((code, message)) = unfit(pod) {
            left_out.push(out(pod, code, message));
        }
    }
    let chosen = match in_order(spec, pods, &live, &mut left_out) {
        Ok(ordered) => fit_sources(spec, ordered, &mut left_out),
        Err(message) => Err(message),
    };
    match chosen {
        Ok((sources, followers)) => Trainer { sources, followers, left_out, missing: None },
        Err(message) => Trainer { sources: Vec::new(), followers: Vec::new(), left_out, missing: Some(message) },
    }
}

fn out(pod: &PodFacts, code: LeftOutCode, message: String) -> LeftOut {
    LeftOut { who: member_name(&pod.name), role: Role::Source, pods: vec![pod.to_ref()], code, message }
}

/// The live pods in order, if it is certain which one is first; otherwise the cause.
fn in_order<'a>(
    spec: &TrainerSpec,
    all: &[&'a PodFacts],
    live: &[&'a PodFacts],
    left_out: &mut Vec<LeftOut>,
) -> Result<Vec<&'a PodFacts>, String> {
    if all.is_empty() {
        return Err("no trainer pod: spec.trainer.selector selects none with the label weightsync.dev/role=trainer".to_owned());
    }
    match &spec.order {
        Order::Auto => match live {
            // A retried Job leaves ended pods; if indices exist, they still show which one is first.
            _ if all.iter().all(|pod| pod.index.is_some()) => numbered(spec, order::by_index, all, live),
            [] => Err(format!("every trainer pod is ending or has ended: {}", names(all))),
            [only] => Ok(vec![only]),
            several => Err(format!(
                "{} trainer pods and no order, so the first is not known: {}; set spec.trainer.order",
                several.len(),
                names(several)
            )),
        },
        Order::Label(label) => numbered(spec, |pod| order::by_label(label, pod), all, live),
        Order::Explicit(listed) => explicit(spec, listed, all, live, left_out),
    }
}

fn names(pods: &[&PodFacts]) -> String {
    let mut names: Vec<_> = pods.iter().map(|pod| pod.name.as_str()).collect();
    names.sort_unstable();
    let more = names.len().saturating_sub(4);
    names.truncate(4);
    if more > 0 { format!("{} and {more} more", names.join(", ")) } else { names.join(", ") }
}

/// The live pods by their number, if exactly one has each number of a source, counted from 0. A pod with a higher number is never taken
/// instead: another rank would lead a trainer that lost its first pod.
fn numbered<'a>(
    spec: &TrainerSpec,
    key: impl Fn(&PodFacts) -> Result<Key, String>,
    all: &[&'a PodFacts],
    live: &[&'a PodFacts],
) -> Result<Vec<&'a PodFacts>, String> {
    let number = |pod: &PodFacts| match key(pod)? {
        Key::Number(number) => Ok(number),
        Key::Text(text) => Err(format!("pod {} has the order label value {text:?}, a trainer's must be an integer", pod.name)),
    };
    let mut ordered = live.iter().map(|pod| Ok((number(pod)?, *pod))).collect::<Result<Vec<_>, String>>()?;
    ordered.sort_by_key(|(number, pod)| (*number, &pod.name));
    for wanted in 0..u64::from(spec.sources) {
        let same: Vec<&PodFacts> = ordered.iter().filter(|(number, _)| *number == wanted).map(|(_, pod)| *pod).collect();
        match same.as_slice() {
            [_] => {}
            [] => {
                return Err(match all.iter().find(|pod| !pod.is_live() && number(pod).is_ok_and(|number| number == wanted)) {
                    Some(pod) => format!("trainer pod {} with index {wanted} is ending or has ended; waiting for the next one", pod.name),
                    None => format!(
                        "no trainer pod has index {wanted}, the first in order (there are {}); waiting for it, \
                         or list the pods in spec.trainer.order.names",
                        names(all)
                    ),
                });
            }
            several => return Err(format!("{} trainer pods have index {wanted}: {}", several.len(), names(several))),
        }
    }
    Ok(ordered.into_iter().map(|(_, pod)| pod).collect())
}

fn explicit<'a>(
    spec: &TrainerSpec,
    listed: &[String],
    all: &[&'a PodFacts],
    live: &[&'a PodFacts],
    left_out: &mut Vec<LeftOut>,
) -> Result<Vec<&'a PodFacts>, String> {
    if let Some(pod) = live.iter().find(|pod| !pod.stable_name) {
        return Err(format!(
            "trainer pod {} gets another name each time it is made, so an explicit order cannot name it: use another order",
            pod.name
        ));
    }
    for pod in live.iter().filter(|pod| !listed.contains(&pod.name)) {
        let message = format!("spec.trainer selects pod {}, but order.names does not list it", pod.name);
        left_out.push(out(pod, LeftOutCode::NotListed, message));
    }
    let mut ordered = Vec::new();
    for (position, name) in listed.iter().enumerate() {
        if let Some(pod) = live.iter().copied().find(|pod| &pod.name == name) {
            ordered.push(pod);
            continue;
        }
        let known = all.iter().any(|pod| &pod.name == name);
        let message = if known {
            format!("trainer pod {name} is ending or has ended; waiting for the next one")
        } else {
            format!("order.names lists {name}, but spec.trainer selects no pod of that name")
        };
        if position < spec.sources as usize {
            return Err(message);
        }
        if !known {
            left_out.push(LeftOut {
                who: member_name(name),
                role: Role::Source,
                pods: Vec::new(),
                code: LeftOutCode::UnknownName,
                message,
            });
        }
    }
    Ok(ordered)
}

type Chosen<'a> = (Vec<&'a PodFacts>, Vec<&'a PodFacts>);

/// Splits the ordered pods into sources and followers; no pod replaces an unfit source.
fn fit_sources<'a>(spec: &TrainerSpec, mut ordered: Vec<&'a PodFacts>, left_out: &mut Vec<LeftOut>) -> Result<Chosen<'a>, String> {
    let wanted = spec.sources as usize;
    if ordered.len() < wanted {
        return Err(format!("{} trainer pods for {wanted} sources: {}", ordered.len(), names(&ordered)));
    }
    let followers = ordered.split_off(wanted);
    for pod in &ordered {
        if let Some((code, message)) = unfit(pod) {
            left_out.push(out(pod, code, message.clone()));
            return Err(format!("the trainer's first pod cannot lead: {message}"));
        }
    }
    Ok((ordered, followers))
}
