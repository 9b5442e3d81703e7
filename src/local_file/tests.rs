use super::LocalFile;

const GOOD: &str = "
name: run
directory: state
trainer: {name: trainer}
rollouts:
- {name: actor-0, engine: {kind: vllm, port: 8000}}
- {name: actor-1, engine: {kind: vllm, port: 8001, command: [vllm, serve, m]}, size: 2}
update: {minReady: 2, pause: Drain}
";

#[test]
fn a_file_is_read_with_its_defaults() {
    let file = LocalFile::parse(GOOD).unwrap();
    assert_eq!((file.rollouts[0].size, file.rollouts[1].size), (1, 2));
    let policy = file.update.policy();
    assert_eq!((policy.min_ready, policy.silence_ms, policy.retain_bytes), (2, 5_000, 4 << 30));
}

#[test]
fn mistakes_are_refused_by_field() {
    let cases = [
        ("name: run", "name: Run_1", "name"),
        ("port: 8001", "port: 8000", "port 8000"),
        ("name: actor-1", "name: actor-0", "actor-0"),
        ("size: 2", "size: 0", "size"),
        ("minReady: 2", "minReady: 3", "minReady"),
        ("directory: state", "direktory: state", "direktory"),
        ("pause: Drain", "pause: Never", "Never"),
        ("pause: Drain", "keep: 0", "update.keep"),
        ("update:", "canary: {prompt: p, minLogProb: -4}\nupdate:", "update.keep"),
        ("update:", "canary: {prompt: p, minLogProb: 1}\nupdate:", "canary.minLogProb"),
        ("update:", "transport: {auto: {}, tcp: {}}\nupdate:", "exactly one"),
        ("update:", "transport: {nccl: {buffers: 1}}\nupdate:", "buffers"),
        ("update:", "transport: {nccl: {env: {LD_PRELOAD: x}}}\nupdate:", "LD_PRELOAD"),
    ];
    for (from, to, says) in cases {
        let error = LocalFile::parse(&GOOD.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(says), "{to}: {error}");
    }
}
