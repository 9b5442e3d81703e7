//! Strangers on every port of a group while it takes versions: 2,000 connections that say nothing, half a request, or garbage. What they may
//! cost is time; never a probe, an update, an epoch, or memory.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use rustix::process::Pid;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::model::Model;
use crate::world::{Actor, World, installed};

/// Connections at once, to all ports together.
const ALL: usize = 2_000;
/// Addresses that they come from: one alone gets few places.
const ADDRESSES: u8 = 40;
/// A stranger that was turned away comes again after this.
const AGAIN: Duration = Duration::from_secs(1);
/// The longest that a probe may take.
const PROBE: Duration = Duration::from_secs(1);
/// What a process may grow by.
const GROWTH: u64 = 64 << 20;
const PODS: [&str; 3] = ["trainer", "actor-0", "actor-1"];

/// Ports of this host on which a process listens.
fn listening(process: Pid) -> Vec<SocketAddr> {
    let links = std::fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero())).unwrap().flatten();
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    let own: BTreeSet<String> =
        targets.filter_map(|target| Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mine = rows.filter(|row| row.get(3) == Some(&"0A") && row.get(9).is_some_and(|inode| own.contains(*inode)));
    let port = |row: Vec<&str>| u16::from_str_radix(row[1].split_once(':').unwrap().1, 16).unwrap();
    mine.map(|row| SocketAddr::from((Ipv4Addr::LOCALHOST, port(row)))).collect()
}

/// Memory of a process, in bytes.
fn resident(process: Pid) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// What strangers say: nothing, half a request, half a TLS handshake, garbage.
fn says(number: usize) -> Vec<u8> {
    match number % 4 {
        0 => Vec::new(),
        1 => b"POST /v1/agents/announce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\nX-Half: ".to_vec(),
        2 => vec![22, 3, 1, 0x3f, 0xff, 1, 0, 0x3f],
        _ => (0..4096u32).flat_map(|n| n.wrapping_mul(2_654_435_761).wrapping_add(u32::try_from(number).unwrap()).to_le_bytes()).collect(),
    }
}

/// Comes again and again, until it is dropped.
async fn stay(number: usize, from: Ipv4Addr, to: SocketAddr) {
    loop {
        if let Ok(socket) = TcpSocket::new_v4()
            && socket.bind(SocketAddr::new(from.into(), 0)).is_ok()
            && let Ok(Ok(mut stream)) = timeout(Duration::from_secs(5), socket.connect(to)).await
            && stream.write_all(&says(number)).await.is_ok()
        {
            let mut heard = [0; 256];
            while stream.read(&mut heard).await.is_ok_and(|read| read > 0) {}
        }
        sleep(AGAIN).await;
    }
}

/// The slowest answer of a probe's port, asked five times a second until it is dropped.
async fn probe(world: &World, url: String, slowest: &std::cell::Cell<Duration>) {
    let mut due = Instant::now();
    loop {
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build().unwrap();
        let answer = client.get(&url).send().await.map(|answer| answer.status().as_u16());
        // From when it was due: a task that waited for this machine in between is slow as well.
        let took = due.elapsed();
        // On a busy machine a peer may be cut before its first byte: that counts as slow, and is compared with the plain server in the end.
        assert!(answer.as_ref().ok() == Some(&200) || took > PROBE, "{url} after {took:?} in {}: {answer:?}", world.folder().display());
        slowest.set(slowest.get().max(took));
        due = Instant::now() + Duration::from_millis(200);
        sleep_until(due).await;
    }
}

/// A server that does nothing but answer: what a probe takes on this machine at this moment. Ends with the task.
async fn plain() -> (String, tokio::task::JoinHandle<()>) {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}/healthz", listener.local_addr().unwrap());
    let serves = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 1024];
            if stream.read(&mut request).await.is_ok() {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
            }
        }
    });
    (url, serves)
}

#[tokio::test(flavor = "multi_thread")]
async fn group_takes_versions_among_two_thousand_strangers() {
    let world = World::start(json!({}), [Actor::new(), Actor::new()]).await;
    world.until_ready(2).await;
    publish(&world, 1).await;
    let mut processes = BTreeMap::from([("coordinator", world.coordinator())]);
    for pod in PODS {
        processes.insert(pod, world.agent(pod).await);
    }
    let mut ports = Vec::new();
    let mut probes = Vec::new();
    for (name, process) in &processes {
        let own = listening(*process);
        assert!(own.len() >= if *name == "coordinator" { 1 } else { 4 }, "{name} listens on {own:?}");
        for port in &own {
            let status =
                async |path: &str| world.http.get(format!("http://{port}{path}")).send().await.map(|answer| answer.status().as_u16());
            if status("/healthz").await.ok() == Some(200) && status("/metrics").await.ok() == Some(404) {
                probes.push(format!("http://{port}/healthz"));
            }
        }
        ports.extend(own);
    }
    assert_eq!(probes.len(), PODS.len(), "each agent has a port for probes: {ports:?}");

    let epoch = world.roster("trainer").await["epoch"].clone();
    let before: BTreeMap<&str, u64> = processes.iter().map(|(name, process)| (*name, resident(*process))).collect();
    let mut strangers = JoinSet::new();
    for number in 0..ALL {
        let from = Ipv4Addr::new(127, 0, 1, 1 + u8::try_from(number % usize::from(ADDRESSES)).unwrap());
        // Each port gets each kind from each address.
        strangers.spawn(stay(number / ports.len(), from, ports[number % ports.len()]));
    }
    let (slowest, slowest_plain) = (std::cell::Cell::new(Duration::ZERO), std::cell::Cell::new(Duration::ZERO));
    let (plain, serves) = plain().await;
    let mut most = before.clone();
    let updates = async {
        for version in 2..8 {
            publish(&world, version).await;
            for (name, process) in &processes {
                let now = resident(*process);
                most.entry(name).and_modify(|most| *most = (*most).max(now));
            }
            sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::select! {
        () = updates => {}
        _ = futures::future::join_all(probes.into_iter().map(|url| probe(&world, url, &slowest))) => {}
        () = probe(&world, plain, &slowest_plain) => {}
    }
    serves.abort();
    let grown: BTreeMap<&str, u64> = most.iter().map(|(name, most)| (*name, (most - before[name]) >> 20)).collect();
    println!("slowest probe {:?}, MiB grown {grown:?}", slowest.get());
    // On a machine that is busy with much else, no server answers within a second.
    let limit = PROBE.max(3 * slowest_plain.get());
    assert!(slowest.get() < limit, "a probe took {:?}, and one of a plain server {:?}", slowest.get(), slowest_plain.get());
    for (name, most) in most {
        assert!(most - before[name] < GROWTH, "{name} grew from {} to {most} bytes", before[name]);
    }
    drop(strangers);
    assert_eq!(world.roster("trainer").await["epoch"], epoch, "no member was left out");
}

async fn publish(world: &World, version: u64) {
    let model = Model::small(version);
    let checkpoint = world.folder().join(version.to_string());
    let result = world.publish(&model.save(Path::new(&checkpoint)), version, &[]).await.done();
    assert_eq!(installed(&result), ["actor-0", "actor-1"], "{result}");
    for actor in [0, 1] {
        assert!(world.serves(actor, &model).await, "actor-{actor} serves version {version}");
    }
}
