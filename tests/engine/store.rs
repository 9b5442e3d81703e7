//! The store of `weightsync_torch::store` against the real torch of `WEIGHTSYNC_VENV`: its client, its prefixes, and whole process groups
//! that have no other store. Where it is empty, the same steps are taken by our own client, which is held against the same answers.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use weightsync_torch::store::{Client, Server, nccl_id_keys, prefixed};

use super::real::venv;

/// Torch starts in a minute where other work has the cores.
const SOON: Duration = Duration::from_secs(600);

async fn server() -> Server {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let admitted = |address: IpAddr| address.is_loopback();
    Server::bind(address, admitted, &CancellationToken::new()).await.unwrap()
}

/// A process of the real torch; killed when it is dropped.
struct Torch {
    child: Child,
    said: Option<tokio::task::JoinHandle<Vec<Value>>>,
    stdin: Option<ChildStdin>,
}

impl Torch {
    fn start(python: &std::path::Path, arguments: &[String]) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/engine/store.py");
        let mut command = Command::new(python);
        command.arg(script).args(arguments).env("OMP_NUM_THREADS", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Up to "done", where it has one, else to its end.
        let read = move || {
            let mut said = Vec::new();
            for line in lines.map_while(Result::ok) {
                said.push(serde_json::from_str(&line).unwrap());
                if said.last() == Some(&json!("done")) {
                    break;
                }
            }
            said
        };
        let stdin = child.stdin.take();
        Self { child, said: Some(tokio::task::spawn_blocking(read)), stdin }
    }

    async fn said(&mut self) -> Vec<Value> {
        tokio::time::timeout(SOON, self.said.take().unwrap()).await.unwrap().unwrap()
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn python() -> Option<std::path::PathBuf> {
    venv().map(|venv| venv.join("bin/python"))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs torch: make engine-test"]
async fn torchs_client_finds_everything_that_torchs_server_has() {
    let server = server().await;
    server.set("/from_rust", b"hello").unwrap();
    let port = server.address().port().to_string();
    if let Some(python) = python() {
        let mut torch = Torch::start(&python, &["api".to_owned(), port]);
        let said = torch.said().await;
        let expected = [
            json!("hello"),
            json!("v"),
            json!([2, 42, "42"]),
            json!(["x", "y"]),
            json!(["z", "z"]),
            json!([true, false]),
            json!(["v!", "1", "2"]),
            json!([true, false, false]),
            json!("timed out"),
            json!("2"),
            json!(6),
            json!(500_000),
            json!([2, "1", "2", 0]),
            json!("nested"),
        ];
        assert_eq!(&said[..expected.len()], expected);
        assert_eq!(said.last(), Some(&json!("done")));
        server.wait_for_clients(1, SOON).await.unwrap();
        assert_eq!(server.get("/outer/inner/p").as_deref(), Some(b"nested".as_slice()));
        assert_eq!(server.readers("/from_rust"), 1);
        drop(torch);
    } else {
        let mut client = Client::connect(server.address(), SOON).await.unwrap();
        client.hello().await.unwrap();
        assert_eq!(client.get("/from_rust", SOON).await.unwrap(), b"hello");
        assert_eq!((client.add("/n", 2).await.unwrap(), client.add("/n", 40).await.unwrap()), (2, 42));
        assert_eq!(client.compare_set("/c", b"x", b"y").await.unwrap(), b"x");
        assert_eq!(client.compare_set("/c", b"", b"y").await.unwrap(), b"y");
        server.wait_for_clients(1, SOON).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs torch: make engine-test"]
async fn torchs_prefixes_lead_to_the_keys_of_the_groups_id() {
    let server = server().await;
    let group = "weights-3c6f-epoch-7";
    let keys = nccl_id_keys(group);
    for (key, byte) in keys.iter().zip(1..) {
        server.set(key, &[byte; 128]).unwrap();
    }
    let found = if let Some(python) = python() {
        let mut torch = Torch::start(&python, &["keys".into(), server.address().port().to_string(), group.into()]);
        torch.said().await.remove(0)
    } else {
        let mut client = Client::connect(server.address(), SOON).await.unwrap();
        let inner = format!("{group}/");
        let classic = client.get(&prefixed(&[group, &inner, "cuda/"], "0"), SOON).await.unwrap();
        let nccl2 = client.get(&prefixed(&[group, &inner, "cuda/", group], "nccl_storekey_0"), SOON).await.unwrap();
        json!([hex(&classic), hex(&nccl2)])
    };
    assert_eq!(found, json!(["01".repeat(128), "02".repeat(128)]));
    assert_eq!(keys.map(|key| server.readers(&key)), [1, 1]);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs torch: make engine-test"]
async fn process_groups_of_torch_form_with_no_other_store() {
    let server = server().await;
    let (group, world) = ("weights-1", 2_u32);
    let port = server.address().port();
    if let Some(python) = python() {
        let arguments = |rank: u32| ["gloo".into(), port.to_string(), rank.to_string(), world.to_string(), group.into()];
        let mut ranks: Vec<Torch> = (0..world).map(|rank| Torch::start(&python, &arguments(rank))).collect();
        for rank in &mut ranks {
            assert_eq!(rank.said().await, [json!([0.0, 7.0, 3.0])]);
        }
        // Where gloo looked shows where NCCL will: the same nesting, with "cuda" for "cpu".
        assert!(server.get(&format!("/{group}/{group}//cpu//0/0")).is_some());
    } else {
        let mut ranks = Vec::new();
        for _ in 0..world {
            let mut rank = Client::connect(server.address(), SOON).await.unwrap();
            rank.hello().await.unwrap();
            ranks.push(rank);
        }
        server.wait_for_clients(2, SOON).await.unwrap();
    }
}

/// `WEIGHTSYNC_ENGINE_CODE` is the folder of `tests/tools/engine-code.sh`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs torch: make engine-test"]
async fn the_engines_own_group_code_needs_no_other_store() {
    let python = python().expect("torch runs the engines' code");
    let code = std::env::var("WEIGHTSYNC_ENGINE_CODE").expect("WEIGHTSYNC_ENGINE_CODE=$(tests/tools/engine-code.sh)");
    for engine in ["sglang", "lmdeploy"] {
        let server = server().await;
        let port = server.address().port().to_string();
        let mut ranks = Torch::start(&python, &["wheel".into(), port, engine.into(), code.clone()]);
        let (all, received) = (json!([true, true, true]), json!([true, [790, 0], [790, 0]]));
        let once = [all.clone(), received, all.clone()];
        let expected: Vec<Value> = [all].into_iter().chain(once.clone()).chain(once).collect();
        assert_eq!(ranks.said().await, expected, "{engine}");
        for group in ["weights-1", "weights-2"] {
            assert!(server.get(&format!("/{group}/{group}//cpu//0/0")).is_some(), "{engine}: gloo looked elsewhere");
        }
    }
}
