//! `weightsync doctor` on machines with GPUs, without, and with a driver that hangs.

use std::fs;
use std::process::{Output, Stdio};

use serde_json::Value;
use tokio::process::Command;

use super::fixture::{Machine, uuid};
use crate::world::{PROGRAM, SOON};

async fn doctor(machine: &Machine, arguments: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.arg("doctor").args(arguments).envs(machine.environment()).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(SOON, command.output()).await.expect("the doctor ends").unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

async fn report(machine: &Machine, arguments: &[&str]) -> Value {
    let output = doctor(machine, &[&["--output", "json"], arguments].concat()).await;
    serde_json::from_slice(&output.stdout).unwrap()
}

async fn text(machine: &Machine) -> String {
    String::from_utf8(doctor(machine, &[]).await.stdout).unwrap()
}

/// Nothing here is a driver.
fn machine_without_a_driver() -> (Machine, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("libcuda.so.1"), "").unwrap();
    (Machine::new().with_libraries(folder.path()), folder)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doctor_finds_gpus_links_and_nccl() {
    let report = report(&Machine::new(), &[]).await;
    assert_eq!(report["driver"]["found"], "13.0");
    let uuids: Vec<_> = report["gpus"].as_array().unwrap().iter().map(|gpu| gpu["uuid"].as_str().unwrap().to_owned()).collect();
    assert_eq!(uuids, (0..4).map(uuid).collect::<Vec<_>>());
    assert_eq!(report["links"][0], serde_json::json!(["same", "nvlink", "nvlink", "nvlink"]));
    assert_eq!(report["nccl"]["found"]["version"], 22809);
    let nccl = &report["transports"][0];
    assert_eq!((&nccl["transport"], &nccl["unusable"]), (&"nccl".into(), &Value::Null));
    assert_eq!(nccl["ways"][0]["uses"], "NVLink between all 4 GPUs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doctor_says_why_the_better_way_is_not_taken() {
    let report = report(&Machine::new().with("FAKEGPU_PEER", 0), &[]).await;
    let way = &report["transports"][0]["ways"][0];
    assert!(way["uses"].as_str().unwrap().starts_with("host memory"), "{way}");
    assert_eq!(way["notBetter"], "GPU 0 cannot reach the memory of GPU 1");
    let text = text(&Machine::new().with("FAKEGPU_MIG", 1)).await;
    assert!(text.contains("transport nccl\n  cannot be used: no GPU can be used"), "{text}");
    assert!(text.contains("MIG"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doctor_works_on_a_machine_with_nothing() {
    let (machine, _folder) = machine_without_a_driver();
    let text = text(&machine).await;
    assert!(text.contains("driver         no NVIDIA driver"), "{text}");
    assert!(text.contains("transport nccl\n  cannot be used: no NVIDIA driver"), "{text}");
    assert!(text.contains("transport tcp\n  all members: host memory"), "{text}");
    let report: Value = serde_json::from_slice(&doctor(&machine, &["-o", "json"]).await.stdout).unwrap();
    let gdr = report["gdr"].as_array().unwrap();
    assert!(gdr.iter().any(|check| check["about"] == "NIXL" && check["change"].as_str().is_some_and(|change| change.contains("nixl-cu"))));
    assert_eq!((report["gpus"].as_array().unwrap().len(), &report["driver"]["found"]), (0, &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_hangs_is_one_more_finding() {
    let machine = Machine::new();
    machine.order("cuInit * hang");
    let report = report(&machine, &["--timeout", "1"]).await;
    let why = report["driver"]["missing"].as_str().unwrap();
    assert!(why.contains("killed"), "{why}");
    assert_eq!(report["transports"][2]["transport"], "tcp");
}
