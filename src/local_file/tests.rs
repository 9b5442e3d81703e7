use super::LocalFiles;
use weightsync_core::protocol::Preflight;

const OBJECT: &str = "
apiVersion: weightsync.dev/v1alpha1
kind: WeightSync
metadata: {name: run}
spec:
  trainer: {selector: {matchLabels: {app: trainer}}}
  rollouts:
  - {name: small, selector: {matchLabels: {app: small}}, engine: {kind: VLLM}}
  - {name: large, selector: {matchLabels: {app: large}}, engine: {kind: SGLang}, ranks: 2}
  membership: {minReady: 2}
  update: {pause: Abort}
";
const PROCESSES: &str = "
apiVersion: weightsync.dev/v1alpha1
kind: LocalProcesses
rollouts:
- {name: actor-0, pool: large, command: [sglang, serve]}
- {name: actor-1, pool: small}
";

fn parse(object: &str, processes: &str) -> Result<LocalFiles, String> {
    LocalFiles::parse(&[object.to_owned(), processes.to_owned()])
}

#[test]
fn files_are_read_with_the_defaults_of_one_host() {
    let files = parse(OBJECT, PROCESSES).unwrap();
    let rollouts: Vec<_> = files.rollouts.iter().map(|one| (one.process.name.as_str(), one.port, one.ranks, one.kind.name())).collect();
    assert_eq!(rollouts, [("actor-1", 8000, 1, "vllm"), ("actor-0", 30_000, 2, "sglang")], "in the order of the pools");
    assert_eq!((files.name().as_str(), files.processes.trainer.name.as_str()), ("run", "trainer"));
    let policy = files.policy();
    assert_eq!((policy.min_ready, policy.silence_ms, policy.data_tls), (2, 10_000, false));
    assert_eq!(policy.transport.preflight, Preflight::Off);
    let own = OBJECT.replace("  update:", "  transport: {tls: true, preflight: Auto}\n  update:");
    let policy = parse(&own, PROCESSES).unwrap().policy();
    assert_eq!((policy.data_tls, policy.transport.preflight), (true, Preflight::Auto), "what the object says counts");
}

#[test]
fn one_file_with_both_documents_and_pods_is_read() {
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n";
    let together = format!("{OBJECT}---\n{pod}---\n{PROCESSES}");
    assert_eq!(LocalFiles::parse(&[together]).unwrap(), parse(OBJECT, PROCESSES).unwrap());
}

#[test]
fn mistakes_are_refused_by_field() {
    let cases = [
        ("name: run", "name: Run_1", "metadata.name"),
        ("name: actor-1", "name: actor-0", "actor-0"),
        ("pool: small", "pool: smal", "no pool smal; it has small, large"),
        (", pool: small", "", "set pool"),
        ("pool: small", "pool: small, port: 30000", "port 30000"),
        ("minReady: 2", "minReady: 3", "minReady"),
        ("rollouts:\n- {name", "direktory: x\nrollouts:\n- {name", "direktory"),
        ("pause: Abort", "pause: Never", "Never"),
        ("pause: Abort", "pauze: Abort", "spec.update.pauze: no such field"),
        ("pause: Abort", "onWedged: RestartPod", "onWedged"),
        ("  update:", "  suspend: true\n  update:", "suspend"),
        ("ranks: 2", "replica: {pods: 2}", "replica.pods"),
        ("ranks: 2", "ranks: 0", "ranks"),
        ("ranks: 2", "ranks: many", "spec.rollouts[1].ranks: invalid type: string"),
        ("pool: small", "pool: small, port: http", "rollouts[1].port: invalid type: string"),
        ("  update:", "  canary: {prompt: p, minLogProb: -4}\n  update:", "membership.keep"),
        ("kind: LocalProcesses", "kind: Processes", "LocalProcesses"),
        ("kind: LocalProcesses", "kind: WeightSync", "2 documents"),
        ("v1alpha1\nkind: LocalProcesses", "v1\nkind: LocalProcesses", "apiVersion"),
        ("v1alpha1\nkind: WeightSync", "v1\nkind: WeightSync", "apiVersion"),
    ];
    for (from, to, says) in cases {
        let changed = |text: &str| text.replacen(from, to, 1);
        assert_ne!((changed(OBJECT), changed(PROCESSES)), (OBJECT.to_owned(), PROCESSES.to_owned()), "{from}");
        let error = parse(&changed(OBJECT), &changed(PROCESSES)).unwrap_err();
        assert!(error.contains(says), "{to}: {error}");
    }
}
