//! What the chart renders, for the values that people set: checked without a cluster, by helm itself.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::admissionregistration::{v1 as admission, v1alpha1 as mutating};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1 as rbac;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use weightsync_net::identity::{Ca, Identity, verifies};

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
    template_of(Path::new(CHART), values, version, &[])
}

/// Renders for a cluster of a version that also serves these APIs.
fn template_of(chart: &Path, values: &Value, version: &str, apis: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    std::fs::write(&file, values.to_string()).unwrap();
    let mut command = Command::new(helm());
    command.args(["template", "ws"]).arg(chart);
    command.args(["--namespace", "sys", "--kube-version", version, "--values"]).arg(file);
    for api in apis {
        command.args(["--api-versions", api]);
    }
    command.env("HELM_CACHE_HOME", folder.path()).env("HELM_CONFIG_HOME", folder.path()).env("HELM_DATA_HOME", folder.path());
    command.output().unwrap()
}

/// Objects that the chart makes of these values.
fn render(values: &Value) -> Vec<Value> {
    render_for(values, "1.36.3", &[])
}

/// The same, for a cluster of a version that also serves these APIs.
fn render_for(values: &Value, version: &str, apis: &[&str]) -> Vec<Value> {
    let output = template_of(Path::new(CHART), values, version, apis);
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

/// Everything that is off by default, on. The linters of `make chart-lint` check what it renders too.
fn everything() -> Value {
    serde_saphyr::from_str(include_str!("../chart/everything.yaml")).unwrap()
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
    assert_eq!(budget["spec"]["unhealthyPodEvictionPolicy"], "AlwaysAllow", "one that cannot start holds up no drain");
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
        (json!({"injection": {"method": "Sidecar"}}), "method"),
        (json!({"injection": {"resources": {"claims": []}}}), "claims"),
        (json!({"injection": {"resources": {"limits": {"memory": "much"}}}}), "memory"),
        (json!({"injection": {"sharedMemory": {"sizeLimit": "8 GiB"}}}), "sizeLimit"),
        (json!({"image": {"digest": "latest"}}), "digest"),
        (json!({"fullnameOverride": "Not_A_Name"}), "fullnameOverride"),
        (json!({"commonLabels": {"app.kubernetes.io/name": "other"}}), "app.kubernetes.io/name"),
        (json!({"imagePullSecrets": ["registry"]}), "imagePullSecrets"),
        (json!({"injection": {"imagePullSecrets": [{"secret": "registry"}]}}), "imagePullSecrets"),
        (json!({"topologySpreadConstraints": [{"maxSkew": 1}]}), "topologySpreadConstraints"),
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

/// The pod template of the controller.
fn controller(objects: &[Value], name: &str) -> Value {
    named(objects, "Deployment", name)["spec"]["template"].clone()
}

#[test]
fn overridden_name_replaces_the_releases_everywhere() {
    for (values, name) in [
        (json!({"nameOverride": "sync"}), "ws-sync"),
        (json!({"nameOverride": "w"}), "ws"),
        (json!({"fullnameOverride": "sync", "nameOverride": "other"}), "sync"),
    ] {
        let objects = render(&values);
        assert!(!serde_json::to_string(&objects).unwrap().contains("ws-weightsync"), "{values}");
        let template = controller(&objects, name);
        assert_eq!(template["spec"]["serviceAccountName"], name);
        assert!(template["spec"]["containers"][0]["args"].as_array().unwrap().contains(&json!(format!("--name={name}"))), "{template}");
        assert!(injections(&objects).contains(&format!("https://{name}.sys.svc:8443")), "agents enrol at the Service");
        // The plugin finds an installation by this label.
        assert_eq!(template["metadata"]["labels"]["app.kubernetes.io/name"], "weightsync");
    }
}

#[test]
fn common_labels_are_on_every_object_and_in_no_selector() {
    let mut values = everything();
    values["commonLabels"] = json!({"team": "rl", "release": "all"});
    let objects = render(&values);
    for object in &objects {
        let labels = &object["metadata"]["labels"];
        assert_eq!(labels["team"], "rl", "{} {}", object["kind"], object["metadata"]["name"]);
        // A label of one object goes before that of all.
        let release = if object["kind"] == "ServiceMonitor" { "prom" } else { "all" };
        assert_eq!(labels["release"], release, "{} {}", object["kind"], object["metadata"]["name"]);
    }
    assert_eq!(controller(&objects, "ws-weightsync")["metadata"]["labels"]["team"], "rl");
    let budget = named(&objects, "PodDisruptionBudget", "ws-weightsync");
    for selector in [&named(&objects, "Deployment", "ws-weightsync")["spec"]["selector"], &budget["spec"]["selector"]] {
        assert!(selector["matchLabels"]["team"].is_null(), "a selector cannot be changed by an upgrade: {selector}");
    }
    assert!(named(&objects, "Service", "ws-weightsync")["spec"]["selector"]["team"].is_null());
}

#[test]
fn controllers_pod_has_the_fields_that_values_set() {
    let spread =
        json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": {"a": "b"}}}]);
    let fields = json!({
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": spread,
    });
    let mut values = fields.clone();
    values["podAnnotations"] = json!({"sidecar.istio.io/inject": "false"});
    values["resources"] = json!({"limits": {"memory": "1Gi"}});
    let template = controller(&render(&values), "ws-weightsync");
    for (field, value) in fields.as_object().unwrap() {
        assert_eq!(template["spec"][field], *value, "{field}");
    }
    assert_eq!(template["metadata"]["annotations"], values["podAnnotations"]);
    assert_eq!(template["spec"]["containers"][0]["resources"]["limits"]["memory"], "1Gi");
}

#[test]
fn spread_without_selector_counts_the_controllers_pods() {
    let spread = json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"});
    let objects = render(&json!({"topologySpreadConstraints": [spread]}));
    let constraint = &controller(&objects, "ws-weightsync")["spec"]["topologySpreadConstraints"][0];
    assert_eq!(constraint["labelSelector"], named(&objects, "Deployment", "ws-weightsync")["spec"]["selector"]);
    assert_eq!(constraint["topologyKey"], "zone");
}

#[test]
fn several_controllers_prefer_different_nodes_by_default() {
    let spread = |values: Value| controller(&render(&values), "ws-weightsync")["spec"]["topologySpreadConstraints"].clone();
    let selector = named(&render(&json!({})), "Deployment", "ws-weightsync")["spec"]["selector"].clone();
    let soft = json!([{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "matchLabelKeys": ["pod-template-hash"], "labelSelector": selector,
    }]);
    assert_eq!(spread(json!({"replicas": 2})), soft);
    assert!(spread(json!({})).is_null());
    let own = json!([{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}]);
    assert_eq!(spread(json!({"replicas": 2, "topologySpreadConstraints": own})), own, "the user's alone");
}

#[test]
fn pull_secrets_of_injected_pods_are_added_to_their_own() {
    let text = injections(&render(&json!({"injection": {"imagePullSecrets": [{"name": "one"}, {"name": "two"}]}})));
    assert_eq!(text.matches(r#"[\"one\",\"two\"].filter(n, !object.spec.?imagePullSecrets"#).count(), 2, "{text}");
    assert_eq!(text.matches(r#"path: \"/spec/imagePullSecrets/-\""#).count(), 2, "{text}");
    let without = injections(&render(&json!({"imagePullSecrets": [{"name": "registry"}]})));
    assert!(!without.contains("imagePullSecrets"), "those of the controller are in another namespace: {without}");
}

/// The beta API of the policy, as Kubernetes 1.34 and 1.35 may serve it.
const BETA: &str = "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy";

#[test]
fn auto_takes_the_policy_where_the_cluster_serves_it() {
    let method = |method: &str| json!({"injection": {"method": method}});
    for (values, version, apis, policies, webhooks) in [
        (json!({}), "1.36.3", [].as_slice(), 2, 0),
        (json!({}), "1.35.0", &[], 0, 1),
        (json!({}), "1.34.0", &[BETA], 2, 0),
        (method("Auto"), "1.33.0", &[], 0, 1),
        (method("Policy"), "1.36.3", &[], 2, 0),
        (method("Policy"), "1.34.0", &[BETA], 2, 0),
        (method("Webhook"), "1.36.3", &[], 0, 1),
        (json!({"injection": {"enabled": false, "method": "Webhook"}}), "1.33.0", &[], 0, 0),
    ] {
        let objects = render_for(&values, version, apis);
        let found = |kind: &str| of(&objects, kind).len();
        let kinds = ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding", "MutatingWebhookConfiguration"];
        assert_eq!(kinds.map(found), [policies, policies, webhooks], "{values} on {version} with {apis:?}");
        // The controller serves what is configured, and may look at it.
        let args = controller(&objects, "ws-weightsync")["spec"]["containers"][0]["args"].to_string();
        assert_eq!(args.contains("--inject="), webhooks == 1, "{args}");
        let rules = named(&objects, "ClusterRole", "ws-weightsync")["rules"].to_string();
        assert_eq!(rules.contains("mutatingwebhookconfigurations"), webhooks == 1, "{rules}");
        // A pod that asks to be wrapped and was not is refused in any case.
        let validations =
            of(&objects, "ValidatingAdmissionPolicy").iter().filter(|one| one["metadata"]["name"] == "ws-weightsync-wrap").count();
        assert_eq!(validations, usize::from(policies + webhooks > 0));
    }
    let lacks = template(&method("Policy"), "1.35.0");
    let why = String::from_utf8(lacks.stderr).unwrap();
    assert!(!lacks.status.success() && why.contains("set it to Auto or Webhook"), "{why}");
}

#[test]
fn webhook_acts_on_labelled_pods_of_watched_namespaces_only() {
    let namespaces = |values: &Value| {
        let objects = render(values);
        let configuration = named(&objects, "MutatingWebhookConfiguration", "ws-weightsync-inject");
        assert_eq!(configuration["webhooks"].as_array().map(Vec::len), Some(1));
        let webhook = configuration["webhooks"][0].clone();
        let fields = ["name", "failurePolicy", "timeoutSeconds", "sideEffects", "reinvocationPolicy"].map(|field| webhook[field].clone());
        assert_eq!(json!(fields), json!(["inject.weightsync.dev", "Fail", 5, "None", "Never"]));
        let pods =
            json!([{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"], "scope": "Namespaced"}]);
        assert_eq!(webhook["rules"], pods);
        let labelled = json!([{"key": "weightsync.dev/role", "operator": "In", "values": ["trainer", "rollout"]}]);
        assert_eq!(webhook["objectSelector"]["matchExpressions"], labelled);
        let service = json!({"name": "ws-weightsync", "namespace": "sys", "port": 8443, "path": "/v1/inject"});
        assert_eq!(webhook["clientConfig"]["service"], service);
        let ports = &named(&objects, "Service", "ws-weightsync")["spec"]["ports"];
        assert!(ports.as_array().unwrap().iter().any(|port| port["port"] == 8443), "{ports}");
        webhook["namespaceSelector"]["matchExpressions"].clone()
    };
    let name = "kubernetes.io/metadata.name";
    let all = json!({"injection": {"method": "Webhook"}});
    assert_eq!(namespaces(&all), json!([{"key": name, "operator": "NotIn", "values": ["kube-system", "sys"]}]));
    let some = json!({"injection": {"method": "Webhook"}, "watchNamespaces": ["rl", "dev"]});
    assert_eq!(namespaces(&some), json!([{"key": name, "operator": "In", "values": ["rl", "dev"]}]));
    let right = json!({"apiGroups": ["admissionregistration.k8s.io"], "resources": ["mutatingwebhookconfigurations"],
        "resourceNames": ["ws-weightsync-inject"], "verbs": ["get"]});
    assert!(named(&render(&some), "ClusterRole", "ws-weightsync")["rules"].as_array().unwrap().contains(&right), "by name only");
}

/// The files of the volume that the controllers read, from the rendered Secret.
fn served(secret: &Value) -> [String; 3] {
    let text = |key: &str| String::from_utf8(STANDARD.decode(secret["data"][key].as_str().unwrap()).unwrap()).unwrap();
    [text("ca.crt"), text("tls.crt"), text("tls.key")]
}

#[test]
fn webhooks_certificate_is_served_and_trusted_as_rendered() {
    let objects = render(&json!({"injection": {"method": "Webhook"}}));
    let secret = named(&objects, "Secret", "ws-weightsync-webhook");
    let [authority, chain, key] = served(secret);
    let configuration = named(&objects, "MutatingWebhookConfiguration", "ws-weightsync-inject");
    let bundle = STANDARD.decode(configuration["webhooks"][0]["clientConfig"]["caBundle"].as_str().unwrap()).unwrap();
    assert_eq!(authority.as_bytes(), bundle);
    let (name, now) = ("ws-weightsync.sys.svc", SystemTime::now());
    verifies(&authority, &chain, name, now + Duration::from_secs(3600 * 86400)).unwrap();
    assert!(verifies(&authority, &chain, "kubernetes.default.svc", now).is_err(), "it is for one name");
    let identity = Identity::new(Ca::generate().unwrap().certificate_pem()).unwrap();
    identity.serve_as(name, &chain, &key).unwrap();

    let spec = controller(&objects, "ws-weightsync")["spec"].clone();
    let volume = json!([{"name": "webhook", "secret": {"secretName": "ws-weightsync-webhook"}}]);
    assert_eq!(spec["volumes"], volume);
    let mount = &spec["containers"][0]["volumeMounts"][0];
    let folder = mount["mountPath"].as_str().unwrap();
    assert!(spec["containers"][0]["args"].as_array().unwrap().contains(&json!(format!("--webhook-certificate={folder}"))));
    // The account cannot read it, and where policies inject there is none.
    let rules: String = objects.iter().filter(|one| one["rules"].is_array()).map(|role| role["rules"].to_string()).collect();
    assert!(!rules.contains("ws-weightsync-webhook"), "{rules}");
    assert!(of(&render(&json!({})), "Secret").iter().all(|secret| secret["metadata"]["name"] != "ws-weightsync-webhook"));
}

#[test]
fn own_certificate_of_the_webhook_replaces_the_charts() {
    let own = |webhook: Value| json!({"injection": {"method": "Webhook", "webhook": webhook}});
    let objects = render(&own(json!({"secretName": "mine", "caBundle": "PEM\n"})));
    assert!(of(&objects, "Secret").iter().all(|secret| secret["metadata"]["name"] != "ws-weightsync-webhook"));
    let configuration = named(&objects, "MutatingWebhookConfiguration", "ws-weightsync-inject");
    assert_eq!(configuration["webhooks"][0]["clientConfig"]["caBundle"], STANDARD.encode("PEM"));
    assert_eq!(controller(&objects, "ws-weightsync")["spec"]["volumes"][0]["secret"]["secretName"], "mine");
    for half in [json!({"secretName": "mine"}), json!({"caBundle": "PEM"})] {
        assert!(refused(&own(half)).contains("belong together"));
    }
}

#[test]
fn webhook_adds_what_the_values_of_injection_set() {
    let settings = |injection: Value| -> Value {
        let mut values = json!({"injection": injection});
        values["injection"]["method"] = json!("Webhook");
        let args = controller(&render(&values), "ws-weightsync")["spec"]["containers"][0]["args"].clone();
        let text = args.as_array().unwrap().iter().find_map(|arg| arg.as_str()?.strip_prefix("--inject=")).unwrap().to_owned();
        serde_json::from_str(&text).unwrap()
    };
    let defaults = json!({"imagePullSecrets": [], "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {}}});
    assert_eq!(settings(json!({})), defaults);
    let all = settings(json!({
        "resources": {"requests": {"cpu": 1, "memory": null}, "limits": {"nvidia.com/gpu": 1}},
        "sharedMemory": {"sizeLimit": "16Gi"},
        "imagePullSecrets": [{"name": "one"}, {"name": "two"}],
    }));
    let expected = json!({
        "resources": {"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": "1"}},
        "sharedMemory": "16Gi",
        "imagePullSecrets": ["one", "two"],
    });
    assert_eq!(all, expected);
    assert_eq!(settings(json!({"resources": {"requests": null}}))["resources"]["requests"], json!({}));
}

#[test]
fn notes_name_the_way_of_injection_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let copied = folder.path().join("weightsync");
    copy_files(Path::new(CHART), &copied);
    // Without a cluster, helm prints no notes: here they are a value of an object.
    let notes = std::fs::read_to_string(Path::new(CHART).join("templates/NOTES.txt")).unwrap();
    let notes = notes.replace('\n', "\n  ");
    std::fs::write(copied.join("templates/notes.yaml"), format!("---\nkind: Notes\nmetadata: {{name: notes}}\nnotes: |\n  {notes}"))
        .unwrap();
    for (values, version, part) in [
        (json!({}), "1.36.3", "by: the cluster's MutatingAdmissionPolicy (injection.method is Auto)"),
        (json!({}), "1.35.0", "by: the controller's webhook (injection.method is Auto)"),
        (json!({"injection": {"method": "Webhook"}}), "1.36.3", "by: the controller's webhook (injection.method is Webhook)"),
        (json!({"injection": {"enabled": false}}), "1.36.3", "Injection is off"),
    ] {
        let output = template_of(&copied, &values, version, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let objects: Vec<Value> = serde_saphyr::from_multiple(&String::from_utf8(output.stdout).unwrap()).unwrap();
        let text = named(&objects, "Notes", "notes")["notes"].as_str().unwrap().to_owned();
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn api_server_may_reach_the_webhook_through_the_policy() {
    let open = |method: &str| {
        let objects = render(&json!({"injection": {"method": method}, "networkPolicy": {"controller": {"enabled": true}}}));
        let rules = named(&objects, "NetworkPolicy", "ws-weightsync")["spec"]["ingress"].clone();
        rules.as_array().unwrap().contains(&json!({"ports": [{"port": "enroll", "protocol": "TCP"}]}))
    };
    assert!(open("Webhook") && !open("Policy"));
}

#[test]
fn chart_from_a_git_source_renders_without_its_repository() {
    let folder = tempfile::tempdir().unwrap();
    let copied = folder.path().join("weightsync");
    copy_files(Path::new(CHART), &copied);
    let (alone, here) = (template_of(&copied, &everything(), "1.36.3", &[]), template(&everything(), "1.36.3"));
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    assert!(alone.stdout == here.stdout, "the chart renders otherwise without the repository");
}

/// Copies files and folders. A link is an error: tools that read charts from Git follow none that leads out of the chart.
fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let (kind, target) = (entry.file_type().unwrap(), to.join(entry.file_name()));
        assert!(!kind.is_symlink(), "{} is a link", entry.path().display());
        if kind.is_dir() {
            copy_files(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}

#[test]
fn chart_has_the_version_of_the_programs() {
    let chart: Value = serde_saphyr::from_str(&std::fs::read_to_string(Path::new(CHART).join("Chart.yaml")).unwrap()).unwrap();
    for field in ["version", "appVersion"] {
        assert_eq!(chart[field], env!("CARGO_PKG_VERSION"), "{field} is stale: make generate");
    }
}

/// For each value of the chart, one that differs from `everything`.
fn each_value() -> BTreeMap<&'static str, Value> {
    let peers = json!([{"podSelector": {}}]);
    let labels = json!({"some": "label"});
    [
        ("affinity", json!({"nodeAffinity": {}})),
        ("aggregateRoles", json!(false)),
        ("commonLabels", labels.clone()),
        ("crds.enabled", json!(false)),
        ("crds.keep", json!(false)),
        ("fence.enabled", json!(false)),
        ("fullnameOverride", json!("other")),
        ("image.digest", json!(format!("sha256:{}", "a".repeat(64)))),
        ("image.flavour", json!("gdr")),
        ("image.pullPolicy", json!("Always")),
        ("image.repository", json!("mirror/ws")),
        ("image.tag", json!("other")),
        ("imagePullSecrets", json!([{"name": "registry"}])),
        ("injection.enabled", json!(false)),
        ("injection.imagePullSecrets", json!([{"name": "registry"}])),
        ("injection.method", json!("Webhook")),
        ("injection.resources.limits", json!({"memory": "1Gi"})),
        ("injection.resources.requests", json!({"memory": "1Gi"})),
        ("injection.sharedMemory.sizeLimit", json!("1Gi")),
        ("injection.webhook.caBundle", json!("other")),
        ("injection.webhook.secretName", json!("other")),
        ("logLevel", json!("debug")),
        ("monitoring.board.annotations", labels.clone()),
        ("monitoring.board.enabled", json!(false)),
        ("monitoring.board.labels", labels.clone()),
        ("monitoring.podMonitor.enabled", json!(false)),
        ("monitoring.podMonitor.interval", json!("7s")),
        ("monitoring.podMonitor.labels", labels.clone()),
        ("monitoring.rules.enabled", json!(false)),
        ("monitoring.rules.labels", labels.clone()),
        ("monitoring.serviceMonitor.enabled", json!(false)),
        ("monitoring.serviceMonitor.interval", json!("7s")),
        ("monitoring.serviceMonitor.labels", labels.clone()),
        ("nameOverride", json!("other")),
        ("networkPolicy.agents.enabled", json!(false)),
        ("networkPolicy.agents.ingress", json!([])),
        ("networkPolicy.agents.namespaces", json!(["other"])),
        ("networkPolicy.apiServerPorts", json!([8443])),
        ("networkPolicy.controller.enabled", json!(false)),
        ("networkPolicy.metricsFrom", peers.clone()),
        ("networkPolicy.tracesTo", peers),
        ("nodeSelector", labels.clone()),
        ("podAnnotations", labels.clone()),
        ("podDisruptionBudget.enabled", json!(false)),
        ("priorityClassName", json!("high")),
        ("replicas", json!(3)),
        ("resources", json!({"limits": {"memory": "1Gi"}})),
        ("serviceAccount.annotations", labels),
        ("serviceAccount.name", json!("other")),
        ("tolerations", json!([{"operator": "Exists"}])),
        ("topologySpreadConstraints", json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}])),
        ("tracing.otlpEndpoint", json!("http://other:4318")),
        ("ui.access", json!("Off")),
        ("watchNamespaces", json!(["rl"])),
    ]
    .into()
}

/// Names of the values that a schema lists, with dots.
fn listed(schema: &Value, definitions: &Value, prefix: &str, names: &mut BTreeSet<String>) {
    let reference = schema["$ref"].as_str().and_then(|path| path.strip_prefix("#/definitions/"));
    let schema = reference.map_or(schema, |name| &definitions[name]);
    match schema["properties"].as_object() {
        Some(properties) => {
            for (name, inner) in properties {
                listed(inner, definitions, &if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") }, names);
            }
        }
        None => assert!(names.insert(prefix.to_owned()), "{prefix} twice"),
    }
}

#[test]
fn every_value_changes_what_is_rendered() {
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(Path::new(CHART).join("values.schema.json")).unwrap()).unwrap();
    let mut names = BTreeSet::new();
    listed(&schema, &schema["definitions"], "", &mut names);
    // helm itself gives it to a chart that is part of another one.
    names.remove("global");
    let values = each_value();
    assert_eq!(names, values.keys().map(|&name| name.to_owned()).collect());
    let own = json!({"method": "Webhook", "webhook": {"secretName": "mine", "caBundle": "PEM"}});
    for (name, value) in values {
        let mut changed = everything();
        if name.starts_with("injection.webhook.") {
            // Elsewhere there is none, and the two belong together.
            changed["injection"] = own.clone();
        }
        let before = render(&changed);
        let mut at = &mut changed;
        for part in name.split('.') {
            at = &mut at[part];
        }
        *at = value;
        assert!(render(&changed) != before, "{name} does nothing");
    }
}

/// Fields of `given` that `known` lacks or has another value for.
fn differences(given: &Value, known: &Value, path: &str, found: &mut Vec<String>) {
    match (given, known) {
        (Value::Object(given), _) => {
            for (name, value) in given {
                differences(value, &known[name], &format!("{path}.{name}"), found);
            }
        }
        (Value::Array(given), Value::Array(known)) if given.len() == known.len() => {
            for (at, (given, known)) in given.iter().zip(known).enumerate() {
                differences(given, known, &format!("{path}[{at}]"), found);
            }
        }
        // An integer of the schema is a number of Kubernetes.
        (Value::Number(given), Value::Number(known)) if given.as_f64() == known.as_f64() => {}
        _ if given == known => {}
        _ => found.push(format!("{path}: {given} became {known}")),
    }
}

fn as_type<K: DeserializeOwned + Serialize>(object: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(serde_json::from_value::<K>(object.clone())?)
}

/// The object as Kubernetes has it. `None`: another operator's.
fn as_known(object: &Value) -> Option<Result<Value, serde_json::Error>> {
    let mut object = object.clone();
    let kind = object["kind"].as_str().unwrap().to_owned();
    if kind.starts_with("MutatingAdmissionPolicy") {
        // The version of these types that this crate has; v1 has the same fields.
        object["apiVersion"] = json!("admissionregistration.k8s.io/v1alpha1");
    }
    let read: fn(&Value) -> Result<Value, serde_json::Error> = match kind.as_str() {
        "ClusterRole" => as_type::<rbac::ClusterRole>,
        "ClusterRoleBinding" => as_type::<rbac::ClusterRoleBinding>,
        "ConfigMap" => as_type::<ConfigMap>,
        "CustomResourceDefinition" => as_type::<CustomResourceDefinition>,
        "Deployment" => as_type::<Deployment>,
        "MutatingAdmissionPolicy" => as_type::<mutating::MutatingAdmissionPolicy>,
        "MutatingAdmissionPolicyBinding" => as_type::<mutating::MutatingAdmissionPolicyBinding>,
        "MutatingWebhookConfiguration" => as_type::<admission::MutatingWebhookConfiguration>,
        "NetworkPolicy" => as_type::<NetworkPolicy>,
        "PodDisruptionBudget" => as_type::<PodDisruptionBudget>,
        "Role" => as_type::<rbac::Role>,
        "RoleBinding" => as_type::<rbac::RoleBinding>,
        "Secret" => as_type::<Secret>,
        "Service" => as_type::<Service>,
        "ServiceAccount" => as_type::<ServiceAccount>,
        "ValidatingAdmissionPolicy" => as_type::<admission::ValidatingAdmissionPolicy>,
        "ValidatingAdmissionPolicyBinding" => as_type::<admission::ValidatingAdmissionPolicyBinding>,
        "PodMonitor" | "PrometheusRule" | "ServiceMonitor" => return None,
        other => panic!("unexpected kind {other}"),
    };
    Some(read(&object))
}

#[test]
fn rendered_fields_are_all_known_to_kubernetes() {
    let mut values = everything();
    values["watchNamespaces"] = json!(["rl"]);
    for (field, value) in each_value() {
        if !field.contains('.') && values[field].is_null() {
            values[field] = value;
        }
    }
    let webhook = render(&json!({"injection": {"method": "Webhook"}, "networkPolicy": {"controller": {"enabled": true}}}));
    for object in render(&values).into_iter().chain(render(&json!({}))).chain(webhook) {
        let Some(known) = as_known(&object) else { continue };
        let known = known.unwrap_or_else(|error| panic!("{} {}: {error}", object["kind"], object["metadata"]["name"]));
        let mut found = Vec::new();
        differences(&object, &known, "", &mut found);
        found.retain(|difference| !difference.starts_with(".apiVersion"));
        assert!(found.is_empty(), "{} {}: {found:#?}", object["kind"], object["metadata"]["name"]);
    }
}
