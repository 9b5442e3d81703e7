use serde_json::{Value, json};

use super::*;

fn pod(change: impl FnOnce(&mut Value)) -> Pod {
    let mut pod = json!({"metadata": {"name": "a", "annotations": {}}, "spec": {"containers": [{"name": "engine"}, {"name": "other"}]}});
    change(&mut pod);
    serde_json::from_value(pod).unwrap()
}

#[test]
fn agent_of_each_kind_of_launch_names_its_container() {
    let of = |change: &dyn Fn(&mut Value)| agent_of(&pod(change));
    assert_eq!(of(&|_| {}), None);
    let sidecar = json!([{"name": "x"}, {"name": "weightsync-agent"}]);
    assert_eq!(of(&|pod| pod["spec"]["initContainers"] = sidecar.clone()).as_deref(), Some("weightsync-agent"));
    let wrapped = json!(["/opt/weightsync/weightsync", "run", "--", "vllm", "serve"]);
    assert_eq!(of(&|pod| pod["spec"]["containers"][1]["command"] = wrapped.clone()).as_deref(), Some("other"));
    let alone = json!(["/weightsync", "agent"]);
    assert_eq!(of(&|pod| pod["spec"]["containers"][0]["command"] = alone.clone()).as_deref(), Some("engine"));
    assert_eq!(of(&|pod| pod["spec"]["containers"][0]["command"] = json!(["vllm", "run"])), None);
    let ephemeral = json!([{"name": "weightsync-agent-1"}, {"name": "weightsync-agent-2"}, {"name": "debugger"}]);
    assert_eq!(of(&|pod| pod["spec"]["ephemeralContainers"] = ephemeral.clone()).as_deref(), Some("weightsync-agent-2"));
}
