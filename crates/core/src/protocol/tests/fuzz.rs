//! Every message, spoiled: it is refused, or it is a valid message that can be written and read again. It never causes a panic.
//!
//! Examples of all messages are changed at random places, as messages of a foreign, broken or hostile peer would differ. `make fuzz` runs
//! this for a long time.

use proptest::prelude::*;
use proptest::sample::Index;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::protocol::worker::{WorkerCall, WorkerReply};
use crate::protocol::*;

/// Name and example of a message, and how it is read and written again.
pub(super) struct Message {
    pub(super) name: &'static str,
    pub(super) example: Value,
    pub(super) again: fn(&[u8]) -> Result<Vec<u8>, serde_json::Error>,
}

fn again<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Result<Vec<u8>, serde_json::Error> {
    serde_json::to_vec(&serde_json::from_slice::<T>(bytes)?)
}

macro_rules! messages {
    ($($kind:ident: $($example:expr),+;)+) => {
        vec![$($(Message { name: stringify!($kind), example: $example, again: again::<$kind> }),+),+]
    };
}

pub(super) fn messages() -> Vec<Message> {
    let id = json!({"weightsync": "w", "created": 7, "term": 1, "epoch": 3});
    let update = json!({"epoch": id, "version": 9, "attempt": 1});
    let life = json!({"podUid": "u", "instance": "i"});
    let held = json!({"version": 9, "manifest": "ab"});
    let mixed = json!({"version": 9, "beginMs": 1, "endMs": 2});
    let returned = json!({"to": 8, "from": 9, "pinned": true});
    let member = json!({"name": "rollouts/a", "role": "rollout", "rankOffset": 1, "size": 2, "pods": [{"name": "a", "uid": "u", "node": "n"}], "port": 8000});
    let roster = json!({"members": [member], "worldSize": 3, "chain": ["rollouts/a"]});
    let policy = json!({
        "delivery": "Agent", "pause": "Keep", "kvCache": "Reset", "minReady": 1, "maxUnavailable": 2, "maxSkew": 3, "silenceMs": 1, "updateTimeoutMs": 2,
        "retainBytes": 3, "keep": 2, "bucketBytes": 4, "digest": "Blake3", "dataTls": true, "transport": {"wish": "nccl", "slotBytes": 1, "slots": 2, "environment": {"NCCL_DEBUG": "INFO"}, "defaults": {"NCCL_CUMEM_ENABLE": "0"}, "preflight": "Off", "preflightAsked": "r"},
        "health": {"periodMs": 1, "timeoutMs": 2, "failureThreshold": 3, "successThreshold": 4},
        "canary": {"prompt": "p", "maxTokens": 2, "leastLogProbMilli": -4000, "greatestLogProbMilli": 0},
    });
    let groups = json!({"rendezvous": "Store", "size": 2, "whyNot": "x"});
    let engine = json!({"kind": "vllm", "serverVersion": "1", "size": 2, "url": "http://a", "delivery": "d", "answerVersion": "none", "modelBytes": 9, "groups": groups});
    let gpu = json!({"uuid": "GPU-1", "name": "H200", "freeBytes": 1, "memoryBytes": 2});
    let choice = json!({
        "nccl": {"slots": 4, "slotBytes": 64, "ranks": [["trainer/t", ["GPU-1"]]], "guests": ["rollouts/a"]}, "gdr": {"slots": 2, "slotBytes": 64},
        "engines": {"groups": [{"rendezvous": "UniqueId", "members": [["rollouts/a", 2]]}]}, "reason": "r",
    });
    let figures = json!({"outcome": "verified", "bytes": 9, "nanoseconds": 3, "roundTripUs": 2, "mtu": 1500, "clockMs": -1});
    let edge = json!({"from": "trainer/t", "to": "rollouts/a", "places": ["n", "m"], "outcome": "broken", "cause": "c"});
    let poor = json!({"member": "rollouts/a", "from": "trainer/t", "broken": true, "why": "w"});
    let arrangement = json!({"order": ["rollouts/a"], "moved": ["rollouts/a"], "poor": [poor], "source": poor});
    let preflight = json!({"id": id, "transport": "tcp", "asked": "r", "done": true, "measured": 1, "tookMs": 2, "edges": [edge], "arrangement": arrangement});
    let state = json!({
        "preflight": preflight, "member": "rollouts/a", "incarnation": life, "role": "rollout", "phase": "Ready", "epoch": id, "rosterDigest": "d", "transport": choice,
        "retained": held, "earlier": [held], "returned": returned, "installed": held, "provenBy": "Engine", "refused": [{"held": held, "measured": "m"}], "engine": engine, "engineRestarts": 2, "healthy": true, "wedged": false, "pausedUntil": 5, "mixed": [mixed], "received": {"version": 9, "from": "rollouts/b", "by": "gdr", "bytes": 24, "microseconds": 3}, "fabric": {"library": "l", "version": "1", "plugin": "UCX", "transports": ["rc"], "devices": [{"gpu": "GPU-1", "names": ["mlx5_0:1"]}]}, "reason": "r",
    });
    let row = json!({"member": "rollouts/a", "bytes": 5, "step": "Receiving", "reason": "r"});
    let view = json!({
        "id": id, "version": 9, "attempt": 1, "phase": "Transfer", "totalBytes": 10, "members": [row], "phasesMs": [["begin", 1]],
        "failure": "f", "feeding": false,
    });
    let tensor = json!({"name": "w", "dtype": "F32", "shape": [2, 3], "load_unit": "u", "section": "draft"});
    let mut entry = tensor.clone();
    entry["offset"] = json!(0);
    entry["bytes"] = json!(24);
    entry["encoding"] = json!("plain");
    let layout = json!({"artifact": "model", "entries": [entry], "totalBytes": 24, "bucketBytes": 64});
    let (assignment, failed) = (
        json!({"role": "rollout", "engines": [{"kind": "vllm", "port": 8000}], "registered": true, "serveBeforeFirstVersion": true, "current": held, "returned": returned, "newest": 9, "ignored": ["*.inv_freq"], "transport": {"wish": "auto", "slotBytes": 1, "slots": 2, "environment": {"NCCL_DEBUG": "INFO"}, "defaults": {"NCCL_CUMEM_ENABLE": "0"}}}),
        json!({"code": "Timeout", "message": "m", "retryable": true, "phase": "Verify", "member": "rollouts/a"}),
    );
    let shown = json!({"epoch": 3, "version": 9, "replicas": [{"name": "rollouts/a", "url": "u", "state": "ready", "version": 9, "provenBy": "Digests", "rankOffset": 1, "size": 2, "mixed": [mixed]}]});
    let topology = json!({
        "epoch": 3, "group": "g", "worldSize": 3, "address": "a", "port": 1, "timeoutMs": 2, "minReady": 1, "version": 9,
        "replicas": [{"name": "rollouts/a", "url": "u", "rankOffset": 1, "size": 2, "version": 9}],
    });
    let result = json!({
        "version": 9, "epoch": 3, "attempts": 1, "bytes": 24, "manifest": "ab", "installed": ["rollouts/a"], "behind": [["rollouts/b", "r"]],
        "phasesMs": [["begin", 1]], "mixed": [["rollouts/a", [mixed]]], "notes": [["rollouts/a", ["n"]]],
    });
    let nccl = "A".repeat(171) + "=";
    let handle = "A".repeat(86) + "==";
    let ring = json!({"ring": 1, "gpu": "GPU-1", "handle": "h", "bytes": 2, "check": "c", "proven": false});
    messages! {
        EdgeRequest: json!({"id": id, "to": "rollouts/a", "deadlineMs": 5});
        EdgeOutcome: figures, json!({"outcome": "unmeasured", "cause": "c"});
        ClockAnswer: json!({"nowMs": 5});
        PrepareRequest: json!({"id": id, "member": "rollouts/a", "roster": roster, "policy": policy, "why": "w", "deadlineMs": 5});
        PrepareResponse: json!({"incarnation": life, "dataAddress": "a", "gpus": {"gpus": [gpu], "nccl": 1, "reason": "r", "unshared": "u"},
            "fabric": {"nixl": "n", "rdma": true, "reason": "r"}, "state": state});
        CommitRequest: json!({
            "id": id, "addresses": [{"member": "rollouts/a", "incarnation": life, "control": "c", "data": "d", "engineUrl": "e"}],
            "current": held, "returned": returned, "refused": [9], "feeder": "rollouts/a", "transport": choice, "secret": "s", "deadlineMs": 5,
        });
        FenceRequest: json!({"id": id, "reason": "r"});
        ReleaseRequest: json!({"id": id, "reason": "r"});
        Refusal: json!({"code": "StaleEpoch", "message": "m"});
        MemberState: state.clone();
        AgentEvent: json!({"type": "snapshot", "state": state}), json!({"type": "heartbeat"}), json!({"type": "update", "update": view}),
            json!({"type": "peerLost", "id": id, "peer": "rollouts/a", "cause": "c"});
        UpdateView: view.clone();
        BeginRequest: json!({
            "update": update, "layout": layout, "layoutDigest": "d", "algorithm": "gsum64", "feeding": true, "manual": true, "manifestDigest": "ab",
        });
        FinishRequest: json!({"update": update, "tensorDigests": ["00"], "manifestDigest": "ab", "check": true});
        ActivateRequest: json!({"update": update, "agreed": true});
        AbortRequest: json!({"update": update, "reason": "r"});
        UpdateStatus: json!({"update": update, "sequence": 1, "step": "Delivered", "bytes": 2, "reason": "r", "dirty": true, "refused": true, "repeats": true, "fenced": true, "stepsMs": [["a", 1]], "checksum": {"of": "vllm 1", "digest": "ab", "tookMs": 3}, "mixed": [mixed], "notes": ["n"]});
        ExternalBegin: json!({"update": update, "held": held, "timeoutMs": 5});
        ExternalEnd: json!({"update": update, "outcome": {"kind": "delivered", "engineVersion": "v"}}),
            json!({"update": update, "outcome": {"kind": "untouched", "reason": "r"}});
        JoinRequest: json!({"id": id, "nccl": nccl, "deadlineMs": 5});
        LendRequest: json!({"id": id, "memory": {
            "gpu": "GPU-1", "handle": handle, "slots": 2, "slotBytes": 64, "check": "AA==", "checkAt": 8, "pidNamespace": 7,
        }, "deadlineMs": 5});
        JoinResponse: json!({"initMs": 1.5, "warmUpMs": 2.5});
        EngineJoinRequest: json!({
            "id": id, "group": "g", "place": {"by": "store", "address": "a", "port": 1}, "offset": 1, "world": 3, "deadlineMs": 5,
        });
        EngineJoinResponse: json!({"clearedMs": 1, "joinedMs": 2});
        ReceiveRequest: json!({"update": update, "what": {"bucket": 3}, "deadlineMs": 5}), json!({"update": update, "what": "open", "deadlineMs": 5});
        ReceiveResponse: json!({"tookMs": 1, "ahead": true});
        EnrollRequest: json!({"token": "t", "namespace": "n", "pod": "p", "incarnation": life, "csrPem": "c"});
        EnrollResponse: json!({"certificatePem": "c", "caPem": "c", "weightsync": "w", "renewAfterMs": 1, "assignment": assignment});
        Announcement: json!({
            "namespace": "n", "pod": "p", "incarnation": life, "role": "source", "enginePort": 1, "controlAddress": "c", "program": "p",
            "speaks": {"oldest": 1, "newest": 2}, "attached": true,
        });
        RegisteredEngines: json!({"namespace": "n", "incarnation": life, "ports": [8001]});
        AnnounceResponse: json!({"assignment": assignment});
        Rejection: json!({"message": "m", "retryable": true});
        DataHello: json!({
            "update": update, "from": "trainer/t", "to": "rollouts/a", "secret": "s", "rest": [["rollouts/b", "a"]], "tls": false,
            "silenceMs": 1, "probe": true, "preflight": true, "carried": {"root": 0, "passing": ["rollouts/b"], "lent": true, "fabric": {"metadata": "AAAA", "first": {"address": 1, "device": 2}, "slots": 2, "slotBytes": 64}},
        });
        StreamFailure: json!({"kind": "silent", "peer": "rollouts/a", "silenceMs": 5}), json!({"kind": "corrupt", "peer": "rollouts/a", "sequence": 5}),
            json!({"kind": "refused", "peer": "rollouts/a", "refusal": {"code": "Timeout", "message": "m"}}), json!({"kind": "cancelled"});
        ClientRequest: json!({"op": "hello", "protocol": 1, "client": "c"}), json!({"op": "register", "port": 8001, "address": "127.0.0.1"}),
            json!({
                "op": "publish", "version": 9, "tensors": [tensor], "queue": "wait", "activation": "manual", "repeatable": true, "timeoutMs": 5,
                "gpu": {"gpus": ["GPU-1"], "torch": "t", "expandableSegments": true, "pidNamespace": 1},
            }),
            json!({"op": "publishCheckpoint", "version": 9, "path": "p", "queue": "latest", "activation": "auto", "timeoutMs": 5}),
            json!({"op": "filled", "attempt": 1, "sequence": 2, "slot": 3, "event": true}),
            json!({"op": "opened", "ring": 1, "events": ["e"]}),
            json!({"op": "external", "epoch": 3, "version": 9, "digest": "d", "engineVersion": "v", "timeoutMs": 5}),
            json!({"op": "report", "replica": "rollouts/a", "ok": false, "reason": "r"}),
            json!({"op": "broken", "epoch": 3, "reason": "r"});
        ClientReply: json!({"event": "welcome", "protocol": 1, "agent": "a", "version": 9}), json!({"event": "registered", "port": 8001}),
            json!({
                "event": "ring", "memfd": true, "layout": layout, "slots": 4, "slotBytes": 64, "attempt": 1, "cuts": [0], "gpu": ring, "hostBecause": "h",
            }),
            json!({"event": "progress", "version": 9, "attempt": 2, "phase": "Transfer", "bytes": 1, "totalBytes": 2}),
            json!({"event": "done", "result": result}), json!({"event": "error", "error": failed}),
            json!({"event": "roster", "roster": shown}), json!({"event": "epoch", "topology": topology}),
            json!({"event": "again", "attempt": 2, "reason": "r"});
        RosterView: shown.clone();
        WorkerCall: json!({"id": 1, "withinMs": 5, "request": {"do": "stats"}});
        WorkerReply: json!({"id": 1, "result": {"Ok": {"is": "done"}}});
    }
}

/// Any JSON value.
fn anything() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        prop_oneof![Just(0), Just(1), Just(u64::MAX), any::<u64>()].prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        Just(Value::from("x".repeat(70_000))),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[[[[[]]]]]])),
        Just(json!({"kind": {"kind": "kind"}, "op": [], "": null})),
    ]
}

/// One change of a message.
#[derive(Debug, Clone)]
enum Change {
    Replace(Index, Value),
    Remove(Index),
    Double(Index),
    Add(Index, String, Value),
}

fn changes() -> impl Strategy<Value = Change> {
    prop_oneof![
        (any::<Index>(), anything()).prop_map(|(at, value)| Change::Replace(at, value)),
        any::<Index>().prop_map(Change::Remove),
        any::<Index>().prop_map(Change::Double),
        (any::<Index>(), "[a-zA-Z]{0,8}", anything()).prop_map(|(at, name, value)| Change::Add(at, name, value)),
    ]
}

/// Paths to all values below one, including itself.
fn paths(value: &Value, path: &str, all: &mut Vec<String>) {
    all.push(path.to_owned());
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, below)| paths(below, &format!("{path}/{}", escaped(name)), all)),
        Value::Array(items) => items.iter().enumerate().for_each(|(at, below)| paths(below, &format!("{path}/{at}"), all)),
        _ => {}
    }
}

/// A name in a JSON pointer (RFC 6901).
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn change(message: &mut Value, change: &Change) {
    let mut all = Vec::new();
    paths(message, "", &mut all);
    let (Change::Replace(at, _) | Change::Remove(at) | Change::Double(at) | Change::Add(at, ..)) = change;
    let Some(path) = all.get(at.index(all.len())) else { return };
    let (parent, last) = path.rsplit_once('/').unwrap_or_default();
    match change {
        Change::Replace(_, value) => {
            if let Some(place) = message.pointer_mut(path) {
                *place = value.clone();
            }
        }
        Change::Remove(_) => match message.pointer_mut(parent) {
            Some(Value::Object(fields)) => drop(fields.remove(&last.replace("~1", "/").replace("~0", "~"))),
            Some(Value::Array(items)) => drop(items.pop()),
            _ => {}
        },
        Change::Double(_) => {
            if let Some(Value::Array(items)) = message.pointer_mut(path) {
                items.extend(items.clone());
            }
        }
        Change::Add(_, name, value) => {
            if let Some(Value::Object(fields)) = message.pointer_mut(path) {
                fields.insert(name.clone(), value.clone());
            }
        }
    }
}

#[test]
fn the_examples_are_messages_and_every_message_has_one() {
    let examples = messages();
    for Message { name, example, again } in &examples {
        let written = again(example.to_string().as_bytes()).unwrap_or_else(|error| panic!("{name}: {error} in {example}"));
        // The example is read completely: with a wrong field name, the changes would have no effect.
        assert_eq!(serde_json::from_slice::<Value>(&written).unwrap(), *example, "{name}");
    }
    // Every message that is sent by itself has an example; other types are parts of these.
    let sources =
        [include_str!("../control.rs"), include_str!("../update.rs"), include_str!("../identity.rs"), include_str!("../client.rs")];
    let sources =
        sources.into_iter().chain([include_str!("../external.rs"), include_str!("../engine_group.rs"), include_str!("../transport.rs")]);
    for line in sources.flat_map(str::lines) {
        let name =
            line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum ")).and_then(|rest| rest.split([' ', '<', '(']).next());
        let sent = |name: &&str| ["Request", "Response", "Reply", "Status"].iter().any(|end| name.ends_with(end));
        if let Some(name) = name.filter(sent) {
            assert!(examples.iter().any(|example| example.name == name), "{name} has no example");
        }
    }
}

proptest! {
    #[test]
    fn spoiled_message_is_refused_or_round_trips(
        which in any::<Index>(), spoiled in prop::collection::vec(changes(), 1..4), cut in prop::option::weighted(0.1, any::<Index>()),
    ) {
        let messages = messages();
        let Message { name, example, again } = which.get(&messages);
        let mut example = example.clone();
        for one in &spoiled {
            change(&mut example, one);
        }
        let mut text = example.to_string().into_bytes();
        if let Some(cut) = cut {
            text.truncate(cut.index(text.len().max(1)));
        }
        if let Ok(once) = again(&text) {
            let twice = again(&once);
            prop_assert_eq!(twice.ok(), Some(once), "{}", name);
        }
    }

    #[test]
    fn bytes_that_are_no_message_are_refused(which in any::<Index>(), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let messages = messages();
        let Message { again, .. } = which.get(&messages);
        if let Ok(once) = again(&bytes) {
            prop_assert_eq!(again(&once).ok(), Some(once));
        }
    }

    /// A layout comes from a peer, and offsets are computed from it: after a successful check, every computation must be safe.
    #[test]
    fn spoiled_layout_is_refused_or_its_buckets_lie_within(spoiled in prop::collection::vec(changes(), 0..4)) {
        let mut example = messages().into_iter().find(|message| message.name == "BeginRequest").unwrap().example;
        for one in &spoiled {
            change(&mut example["layout"], one);
        }
        let Ok(layout) = serde_json::from_value::<crate::weights::Layout>(example["layout"].take()) else { return Ok(()) };
        if layout.validate().is_err() {
            return Ok(());
        }
        for sequence in 0..8 {
            let Some(bucket) = layout.bucket(sequence) else { break };
            prop_assert!(bucket.bytes > 0 && bucket.offset.checked_add(bucket.bytes).is_some_and(|end| end <= layout.total_bytes));
            for part in layout.parts(bucket.offset, bucket.bytes) {
                prop_assert!(part.in_tensor + part.bytes <= part.entry.bytes && part.in_range + part.bytes <= bucket.bytes);
            }
        }
    }
}
