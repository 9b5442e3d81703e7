//! `weightsync-dev demo --gpu`: the whole product with agents, workers and NCCL between GPUs, a rollout killed in the middle of an update.

use std::process::{Output, Stdio};

use serde_json::Value;
use tokio::process::Command;

use super::fixture::Machine;
use crate::world::SOON;
use weightsync_testkit::dev_program;

async fn demo(machine: &Machine, arguments: &[&str]) -> Output {
    let mut command = Command::new(dev_program());
    command.args(["demo", "--output", "json", "--megabytes", "16"]).args(arguments);
    command.envs(machine.environment()).stdin(Stdio::null()).kill_on_drop(true);
    tokio::time::timeout(2 * SOON, command.output()).await.expect("the demo ends").unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_moves_weights_between_gpus_and_survives_a_kill() {
    for (seed, count) in [("1", "4"), ("2", "4"), ("3", "3")] {
        let machine = Machine::new();
        let output = demo(&machine, &["--gpu", count, "--seed", seed]).await;
        assert!(output.status.success(), "seed {seed}: {}", said(&output));
        let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
        let replicas = count.parse::<u64>().unwrap() - 1;
        assert_eq!((&outcome["transport"], &outcome["verified"]), (&"nccl".into(), &true.into()), "{}", said(&output));
        assert_eq!(outcome["replicas"], replicas);
        let installed: Vec<_> =
            outcome["versions"].as_array().unwrap().iter().map(|row| row["installed"].as_array().unwrap().len()).collect();
        let all = usize::try_from(replicas).unwrap();
        assert_eq!(installed, [all, all - 1, all], "{}", said(&output));
        // The group, the one without the killed rollout, the one with its successor: at least three.
        assert!(outcome["epochs"].as_u64().unwrap() >= 3, "{}", said(&output));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn demo_runs_with_simulated_lmdeploy_on_gpu_memory() {
    let machine = Machine::new();
    let output = demo(&machine, &["--gpu", "3", "--engine", "simulated-lmdeploy"]).await;
    assert!(output.status.success(), "{}", said(&output));
    let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&outcome["transport"], &outcome["verified"], &outcome["replicas"]), (&"nccl".into(), &true.into(), &2.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_says_how_many_gpus_it_needs_and_sees() {
    let machine = Machine::new().with("FAKEGPU_COUNT", 2);
    let output = demo(&machine, &["--gpu"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("needs 3 GPUs") && said(&output).contains("sees 2"), "{}", said(&output));
}
