//! Objects that make no sense: refused by the API server, or named in a condition, with a message that says what to change; and the
//! examples of the documentation, which make sense.

use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};

use super::cluster::{Cluster, MINUTE, eventually};
use super::fixtures::{simulated_vllm, weightsync};

fn with(change: impl FnOnce(&mut Value)) -> Value {
    let mut object = weightsync("bad");
    change(&mut object["spec"]);
    object
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_make_no_sense_are_refused_with_what_to_change() {
    Cluster::run("invalid", |cluster| async move {
        // What the schema's types and limits refuse, and one rule of each kind: of a type, of a field, of fields that exclude each other. All
        // rules are in src/api/tests/rules.rs.
        let cases: Vec<(&str, Value, &[&str])> = vec![
            ("no rollouts", with(|spec| spec["rollouts"] = json!([])), &["spec.rollouts", "should have at least 1 items"]),
            (
                "an unknown engine",
                with(|spec| spec["rollouts"][0]["engine"]["kind"] = json!("TGI")),
                &["engine.kind", "Unsupported value: \"TGI\"", "\"VLLM\""],
            ),
            ("no engine", with(|spec| spec["rollouts"][0]["engine"] = json!({})), &["engine.kind: Required value"]),
            ("a port twice", with(|spec| spec["rollouts"][0]["engine"]["ports"] = json!([8000, 8000])), &["engine.ports", "duplicate"]),
            (
                "port 0",
                with(|spec| spec["rollouts"][0]["engine"]["ports"] = json!([0])),
                &["engine.ports", "should be greater than or equal to 1"],
            ),
            ("an unknown launch", with(|spec| spec["agent"] = json!({"launch": "Magic"})), &["agent.launch", "\"Ephemeral\""]),
            (
                "a negative time",
                with(|spec| spec["health"]["periodSeconds"] = json!(-1)),
                &["health.periodSeconds", "should be greater than or equal to 1"],
            ),
            (
                "an empty selector",
                with(|spec| spec["trainer"]["selector"] = json!({})),
                &["spec.trainer.selector", "name at least one label in matchLabels or matchExpressions"],
            ),
            (
                "minReady 120%",
                with(|spec| spec["membership"] = json!({"minReady": "120%"})),
                &["spec.membership.minReady", "must be a number from 1 to 99999, or a percentage from \"1%\" to \"100%\""],
            ),
            (
                "retain with Ephemeral",
                with(|spec| {
                    spec["agent"] = json!({"launch": "Ephemeral"});
                    spec["update"] = json!({"retainMiB": 1024});
                }),
                &["remove update.retainMiB or choose another agent.launch"],
            ),
        ];
        for (what, object, words) in cases {
            let error = cluster.apply(&object).await.err().unwrap_or_else(|| panic!("{what} was accepted"));
            let message = error.to_string();
            for word in words {
                assert!(message.contains(word), "{what}: the message does not say {word}: {message}");
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transport_added_later_is_accepted_by_both_kinds_of_apply() {
    Cluster::run("transports", |cluster| async move {
        let mut object = weightsync("later");
        object["spec"].as_object_mut().unwrap().remove("transport");
        cluster.apply(&object).await.unwrap();
        for transport in [json!({"type": "TCP"}), json!({"type": "NCCL"}), json!({"type": "Auto"})] {
            object["spec"]["transport"] = transport;
            cluster.apply(&object).await.unwrap();
        }
        object["spec"].as_object_mut().unwrap().remove("transport");
        cluster.apply(&object).await.unwrap();
        // What `kubectl apply` sends without `--server-side`: a merge of what the user changed.
        cluster.patch_weightsync("later", &json!({"spec": {"transport": {"type": "TCP"}}})).await.unwrap();
        cluster.patch_weightsync("later", &json!({"spec": {"transport": {"type": "NCCL"}}})).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_api_server_cannot_know_is_named_in_a_condition() {
    Cluster::run("named", |cluster| async move {
        let condition = |kind: &'static str, words: &'static [&'static str]| {
            move |status: &Value| {
                let all = status["conditions"].as_array().cloned().unwrap_or_default();
                let said: Vec<_> = all.iter().map(|c| format!("{}={} {}: {}", c["type"], c["status"], c["reason"], c["message"])).collect();
                let found =
                    said.iter().find(|text| text.starts_with(&format!("\"{kind}\"")) && words.iter().all(|word| text.contains(word)));
                found.cloned().ok_or_else(|| said.join("; "))
            }
        };
        let within = MINUTE;
        // No trainer pod at all: named, not guessed.
        cluster.create_pod(simulated_vllm("sim-0")).await;
        let first = cluster.apply(&weightsync("first")).await.unwrap();
        cluster.await_status("first", "the missing source is named", within, condition("Ready", &["False", "NoSource"])).await;
        // A second object that claims the same pods: the younger is refused and names the older.
        // Kubernetes counts ages in seconds.
        let made = first.metadata.creation_timestamp.unwrap().0.as_second();
        eventually("the clock's next second", MINUTE, || async {
            let now = k8s_openapi::jiff::Timestamp::now().as_second();
            if now > made { Ok(()) } else { Err(now) }
        })
        .await;
        cluster.apply(&weightsync("second")).await.unwrap();
        cluster.await_status("second", "the older object is named", within, condition("Accepted", &["False", "first"])).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_example_of_the_documentation_is_accepted() {
    Cluster::run("examples", |cluster| async move {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples");
        let files = [folder.clone(), folder.join("quickstart")].map(|folder| std::fs::read_dir(folder).unwrap());
        let mut seen = 0;
        for path in files.into_iter().flatten().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
            let documents: Vec<Value> = serde_saphyr::from_multiple(&std::fs::read_to_string(&path).unwrap()).unwrap();
            for mut document in documents.into_iter().filter(|document| !document.is_null()) {
                document["metadata"]["namespace"] = json!(cluster.namespace);
                let (group, version) = document["apiVersion"].as_str().unwrap().rsplit_once('/').unwrap_or(("", "v1"));
                let kind = GroupVersionKind::gvk(group, version, document["kind"].as_str().unwrap());
                // Kinds of other projects are not installed here.
                if !["", "apps", "autoscaling", "batch", "weightsync.dev"].contains(&group) {
                    continue;
                }
                let api: kube::Api<DynamicObject> =
                    kube::Api::namespaced_with(cluster.client.clone(), &cluster.namespace, &ApiResource::from_gvk(&kind));
                let dry = PatchParams { dry_run: true, ..PatchParams::apply("e2e").force() };
                let name = document["metadata"]["name"].as_str().unwrap().to_owned();
                let applied = api.patch(&name, &dry, &Patch::Apply(&document)).await;
                applied.unwrap_or_else(|error| panic!("{}: {name}: {error}", path.display()));
                seen += 1;
            }
        }
        assert!(seen >= 5, "only {seen} examples were found");
    })
    .await;
}
