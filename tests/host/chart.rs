//! What the chart renders, for the values that people set: checked without a cluster, by helm itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/weightsync");

/// The pinned helm of the test fixture.
fn helm() -> PathBuf {
    let cache = std::env::var_os("WEIGHTSYNC_CACHE").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/weightsync");
    let helm = cache.unwrap_or_else(home).join("bin/helm");
    assert!(helm.exists(), "{} is missing: tests/cluster/tools.sh builds it", helm.display());
    helm
}

fn template(values: &Value, version: &str) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    std::fs::write(&file, values.to_string()).unwrap();
    let mut command = Command::new(helm());
    command.args(["template", "ws", CHART, "--namespace", "sys", "--kube-version", version, "--values"]).arg(file);
    command.env("HELM_CACHE_HOME", folder.path()).env("HELM_CONFIG_HOME", folder.path()).env("HELM_DATA_HOME", folder.path());
    command.output().unwrap()
}

/// Objects that the chart makes of these values.
fn render(values: &Value) -> Vec<Value> {
    let output = template(values, "1.36.3");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    documents.into_iter().filter(|document| !document.is_null()).collect()
}

fn refused(values: &Value) -> String {
    let output = template(values, "1.36.3");
    assert!(!output.status.success(), "{values} is taken");
    String::from_utf8(output.stderr).unwrap()
}

fn of<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = of(objects, kind).into_iter().find(|object| object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name} among {:?}", names(objects)))
}

fn names(objects: &[Value]) -> Vec<String> {
    objects.iter().map(|object| format!("{} {}", object["kind"], object["metadata"]["name"])).collect()
}

/// Everything that is off by default, on.
fn everything() -> Value {
    json!({
        "replicas": 2,
        "monitoring": {
            "serviceMonitor": {"enabled": true, "labels": {"release": "prom"}}, "podMonitor": {"enabled": true},
            "rules": {"enabled": true}, "board": {"enabled": true},
        },
        "networkPolicy": {
            "controller": {"enabled": true},
            "agents": {"enabled": true, "namespaces": ["rl"], "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "router"}}}]}]},
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "tracesTo": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "telemetry"}}}],
        },
        "tracing": {"otlpEndpoint": "http://collector.telemetry:4318"},
    })
}

#[test]
fn the_defaults_need_nothing_that_a_cluster_may_lack() {
    let objects = render(&json!({}));
    let groups: BTreeSet<String> =
        objects.iter().map(|object| object["apiVersion"].as_str().unwrap().split('/').next().unwrap().to_owned()).collect();
    let own: BTreeSet<String> =
        ["v1", "apps", "rbac.authorization.k8s.io", "apiextensions.k8s.io", "admissionregistration.k8s.io"].map(str::to_owned).into();
    assert!(groups.is_subset(&own), "{groups:?}");
    assert!(of(&objects, "NetworkPolicy").is_empty() && of(&objects, "PodDisruptionBudget").is_empty());
    let crd = named(&objects, "CustomResourceDefinition", "weightsyncs.weightsync.dev");
    assert_eq!(crd["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
    let free = render(&json!({"crds": {"keep": false}}));
    assert!(
        named(&free, "CustomResourceDefinition", "weightsyncs.weightsync.dev")["metadata"]["annotations"]["helm.sh/resource-policy"]
            .is_null()
    );
    assert!(of(&render(&json!({"crds": {"enabled": false}})), "CustomResourceDefinition").is_empty());
}

#[test]
fn containers_of_the_chart_are_confined() {
    let objects = render(&everything());
    let specs: Vec<&Value> = objects
        .iter()
        .filter_map(|object| object.pointer("/spec/template/spec").or(object.pointer("/spec")))
        .filter(|spec| spec["containers"].is_array())
        .collect();
    assert_eq!(specs.len(), 1, "the controller");
    for spec in specs {
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
        assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        for container in spec["containers"].as_array().unwrap() {
            let context = &container["securityContext"];
            assert_eq!((&context["allowPrivilegeEscalation"], &context["readOnlyRootFilesystem"]), (&json!(false), &json!(true)));
            assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
            assert!(container["resources"]["limits"]["memory"].is_string());
        }
    }
}

#[test]
fn a_namespaced_install_has_no_right_outside_its_namespaces() {
    let objects = render(&json!({"watchNamespaces": ["rl", "dev"], "aggregateRoles": false}));
    let cluster = of(&objects, "ClusterRole");
    assert_eq!(cluster.len(), 1);
    assert_eq!(cluster[0]["rules"], json!([{"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}]));
    let roles: Vec<&str> = of(&objects, "Role").iter().map(|role| role["metadata"]["namespace"].as_str().unwrap()).collect();
    assert_eq!(roles, ["rl", "dev", "sys"]);
    let bound: Vec<&str> = of(&objects, "RoleBinding").iter().map(|role| role["metadata"]["namespace"].as_str().unwrap()).collect();
    assert_eq!(bound, roles);
    let args = &named(&objects, "Deployment", "ws-weightsync")["spec"]["template"]["spec"]["containers"][0]["args"];
    assert!(args.as_array().unwrap().contains(&json!("--watch-namespaces=rl,dev")), "{args}");
    for policy in of(&objects, "MutatingAdmissionPolicy") {
        let expression = &policy["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"][0];
        assert_eq!(expression["values"], json!(["rl", "dev"]), "{policy}");
    }
    let whole = render(&json!({"aggregateRoles": false}));
    assert_eq!(of(&whole, "Role").len(), 1, "only its own namespace");
    assert!(of(&whole, "ClusterRole")[0]["rules"].as_array().unwrap().len() > 5);
}

#[test]
fn no_rule_of_the_controller_is_wider_than_it_must_be() {
    for values in [json!({}), json!({"watchNamespaces": ["rl"]})] {
        let objects = render(&values);
        for role in of(&objects, "ClusterRole").into_iter().chain(of(&objects, "Role")) {
            for rule in role["rules"].as_array().unwrap() {
                let words = |field: &str| rule[field].as_array().cloned().unwrap_or_default();
                for field in ["apiGroups", "resources", "verbs"] {
                    assert!(!words(field).contains(&json!("*")), "{rule}");
                }
                let touches = |resource: &str| words("resources").contains(&json!(resource));
                assert!(!(touches("secrets") || touches("configmaps")) || !words("resourceNames").is_empty(), "{rule}");
                // Deleting is for wedged engines only, and fenced by an admission policy.
                let verbs = words("verbs");
                let reads = verbs.iter().all(|verb| verb == "list" || verb == "watch");
                assert!(!touches("pods") || reads || verbs == [json!("delete")], "{rule}");
            }
        }
    }
}

#[test]
fn several_controllers_are_kept_through_a_drain_and_one_is_not() {
    let objects = render(&json!({"replicas": 3}));
    let budget = named(&objects, "PodDisruptionBudget", "ws-weightsync");
    assert_eq!(budget["spec"]["minAvailable"], 1);
    assert_eq!(budget["spec"]["selector"], named(&objects, "Deployment", "ws-weightsync")["spec"]["selector"]);
    assert!(of(&render(&json!({"replicas": 3, "podDisruptionBudget": {"enabled": false}})), "PodDisruptionBudget").is_empty());
}

#[test]
fn monitors_find_the_ports_that_are_there() {
    let objects = render(&everything());
    let monitor = named(&objects, "ServiceMonitor", "ws-weightsync");
    assert_eq!(monitor["metadata"]["labels"]["release"], "prom");
    let service = named(&objects, "Service", "ws-weightsync");
    for (label, value) in monitor["spec"]["selector"]["matchLabels"].as_object().unwrap() {
        assert_eq!(service["metadata"]["labels"][label], *value, "{label}");
    }
    let port = &monitor["spec"]["endpoints"][0]["port"];
    assert!(service["spec"]["ports"].as_array().unwrap().iter().any(|known| known["name"] == *port), "{port}");
    let pods = named(&objects, "PodMonitor", "ws-weightsync-agents");
    assert_eq!(pods["spec"]["podMetricsEndpoints"][0]["port"], "weightsync");
    assert_eq!(pods["spec"]["namespaceSelector"], json!({"any": true}));
    let rules = named(&objects, "PrometheusRule", "ws-weightsync");
    let file: Value = serde_saphyr::from_str(&std::fs::read_to_string(Path::new(CHART).join("files/alerts.yaml")).unwrap()).unwrap();
    assert_eq!(rules["spec"], file, "the rules are those that promtool tests");
    let board = named(&objects, "ConfigMap", "ws-weightsync-board");
    assert_eq!(board["metadata"]["labels"]["grafana_dashboard"], "1");
    let json: Value = serde_json::from_str(board["data"]["weightsync.json"].as_str().unwrap()).unwrap();
    assert_eq!(json["title"], "WeightSync");
}

#[test]
fn network_policies_admit_only_what_must_connect() {
    let objects = render(&everything());
    let controller = named(&objects, "NetworkPolicy", "ws-weightsync");
    assert_eq!(controller["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
    let ports: Vec<&Value> = controller["spec"]["ingress"].as_array().unwrap().iter().map(|rule| &rule["ports"][0]["port"]).collect();
    assert_eq!(ports, [&json!("enroll"), &json!("status")]);
    assert!(
        controller["spec"]["ingress"].as_array().unwrap().iter().all(|rule| rule["from"].as_array().is_some_and(|from| !from.is_empty()))
    );
    let api = controller["spec"]["egress"].as_array().unwrap().iter().find(|rule| rule["ports"][0]["port"] == 443).unwrap();
    assert_eq!(api["ports"].as_array().unwrap().len(), 2);
    let agents = named(&objects, "NetworkPolicy", "ws-weightsync-agents");
    assert_eq!((&agents["metadata"]["namespace"], &agents["spec"]["policyTypes"]), (&json!("rl"), &json!(["Ingress"])));
    let text = agents["spec"]["ingress"].to_string();
    for part in ["weightsync.dev/role", "\"sys\"", "monitoring", "router"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let lacks = json!({"networkPolicy": {"agents": {"enabled": true}}});
    assert!(refused(&lacks).contains("name the namespaces"), "a NetworkPolicy belongs to one namespace");
    let watched = render(&json!({"watchNamespaces": ["a", "b"], "networkPolicy": {"agents": {"enabled": true}}}));
    assert_eq!(of(&watched, "NetworkPolicy").len(), 2);
}

#[test]
fn traces_have_somewhere_to_go_only_when_somebody_says_where() {
    let environment = |objects: &[Value]| {
        let deployment = named(objects, "Deployment", "ws-weightsync");
        let entries = deployment["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap();
        entries.iter().find(|entry| entry["name"] == "OTEL_EXPORTER_OTLP_ENDPOINT").map(|entry| entry["value"].clone())
    };
    let all = render(&everything());
    assert_eq!(environment(&all), Some(json!("http://collector.telemetry:4318")));
    let way = json!({"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "telemetry"}}}]});
    let leaves = |objects: &[Value]| named(objects, "NetworkPolicy", "ws-weightsync")["spec"]["egress"].as_array().unwrap().contains(&way);
    assert!(leaves(&all));
    let without = render(&json!({"networkPolicy": {"controller": {"enabled": true}}}));
    assert!(environment(&without).is_none() && !leaves(&without));
}

#[test]
fn view_reads_edit_changes_and_no_role_writes_status() {
    let objects = render(&json!({}));
    let (view, edit) = (named(&objects, "ClusterRole", "ws-weightsync-view"), named(&objects, "ClusterRole", "ws-weightsync-edit"));
    assert_eq!(view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"], "true");
    assert!(edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"].is_null());
    assert_eq!(view["rules"][0]["verbs"], json!(["get", "list", "watch"]));
    assert_eq!(edit["rules"][0]["resources"], json!(["weightsyncs"]));
}

/// Expressions of the policies that put agents into pods.
fn injections(objects: &[Value]) -> String {
    let policies = of(objects, "MutatingAdmissionPolicy");
    assert_eq!(policies.len(), 2, "sidecar and wrap");
    policies.iter().map(|policy| policy["spec"]["mutations"].to_string()).collect()
}

#[test]
fn resources_of_injected_containers_are_rendered_whole() {
    let text = injections(&render(&json!({"injection": {
        "resources": {"requests": {"cpu": 1, "memory": null, "ephemeral-storage": "1Gi"}, "limits": {"memory": "8Gi"}},
        "sharedMemory": {"sizeLimit": "16Gi"},
    }})));
    let resources = r#"initContainers.resources{requests: {\"cpu\":\"1\",\"ephemeral-storage\":\"1Gi\"}, limits: {\"memory\":\"8Gi\"}}"#;
    assert_eq!(text.matches(resources).count(), 2, "{text}");
    assert_eq!(text.matches(r#"emptyDir{medium: \"Memory\", sizeLimit: \"16Gi\"}"#).count(), 2, "{text}");
    let without = injections(&render(&json!({"injection": {"resources": {"requests": null}}})));
    assert!(!without.contains("resources{") && !without.contains("sizeLimit"), "{without}");
}

#[test]
fn image_is_pinned_by_digest_wherever_it_is_named() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let objects = render(&json!({"image": {"repository": "mirror/ws", "tag": "1", "digest": digest}}));
    let image = format!("mirror/ws@{digest}");
    let container = &named(&objects, "Deployment", "ws-weightsync")["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], image.as_str());
    assert!(container["args"].as_array().unwrap().contains(&json!(format!("--agent-image={image}"))), "{container}");
    assert_eq!(injections(&objects).matches(&image).count(), 2);
    assert!(named(&objects, "ValidatingAdmissionPolicy", "ws-weightsync-fence").to_string().contains(&image), "the fence knows it");
}

#[test]
fn values_that_make_no_sense_are_refused_by_name() {
    for (values, part) in [
        (json!({"replica": 2}), "replica"),
        (json!({"ui": {"access": "Everybody"}}), "access"),
        (json!({"monitoring": {"serviceMonitor": {"interval": "soon"}}}), "interval"),
        (json!({"watchNamespaces": ["Not A Name"]}), "watchNamespaces"),
        (json!({"networkPolicy": {"metricsFrom": [{}]}}), "metricsFrom"),
        (json!({"networkPolicy": {"apiServerPorts": [0]}}), "apiServerPorts"),
        (json!({"injection": {"resources": {"claims": []}}}), "claims"),
        (json!({"injection": {"resources": {"limits": {"memory": "much"}}}}), "memory"),
        (json!({"injection": {"sharedMemory": {"sizeLimit": "8 GiB"}}}), "sizeLimit"),
        (json!({"image": {"digest": "latest"}}), "digest"),
    ] {
        let message = refused(&values);
        assert!(message.contains(part), "{part} is not in {message}");
    }
}

#[test]
fn a_flavour_names_another_image_everywhere() {
    let objects = render(&json!({"image": {"tag": "1", "flavour": "gdr"}}));
    let text = serde_json::to_string(&objects).unwrap();
    assert!(text.contains("weightsync:1-gdr") && !text.contains("weightsync:1\\\"") && !text.contains("weightsync:1\""));
    let digest = format!("sha256:{}", "0".repeat(64));
    let why = refused(&json!({"image": {"digest": digest, "flavour": "gdr"}}));
    assert!(why.contains("leave image.flavour empty"), "{why}");
}
