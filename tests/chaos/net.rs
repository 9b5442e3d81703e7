//! Links between pods: each pod has a network namespace with one address, after a pair of virtual interfaces whose other end is here.
//!
//! Everything that pods send each other passes through here, where it can be lost or slowed. Engines and status pages stay reachable
//! for the test whatever a link does. All of it goes with this process's own network namespace.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Where the coordinator listens.
pub const HERE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// Port of every engine; each has a namespace of its own.
pub const ENGINE: u16 = 8000;
/// Port of every agent's status pages.
pub const STATUS: u16 = 9000;
/// Port of every agent's probes.
pub const PROBES: u16 = STATUS + 1;
/// Where strangers connect from; more than one, because one address alone gets few places.
pub const STRANGERS: [Ipv4Addr; 6] = {
    const fn of(last: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 251, last)
    }
    [of(1), of(2), of(3), of(4), of(5), of(6)]
};

/// Runs a command that must work.
pub fn must(words: &[&str]) {
    let output = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", words[0]));
    assert!(output.status.success(), "{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
}

/// Makes this namespace the middle of all links.
pub fn set_up() {
    must(&["mount", "-t", "tmpfs", "tmpfs", "/run"]);
    must(&["ip", "link", "set", "lo", "up"]);
    must(&["ip", "address", "add", &format!("{HERE}/32"), "dev", "lo"]);
    for stranger in STRANGERS {
        must(&["ip", "address", "add", &format!("{stranger}/32"), "dev", "lo"]);
    }
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    // What a dead link still carries: what the test itself asks of engines and status pages.
    let rules = format!(
        "add table inet chaos
         add set inet chaos dead {{ type ifname; }}
         add chain inet chaos from {{ type filter hook prerouting priority 0; }}
         add chain inet chaos to {{ type filter hook postrouting priority 0; }}
         add rule inet chaos from tcp sport {{ {ENGINE}, {STATUS}, {PROBES} }} accept
         add rule inet chaos to tcp dport {{ {ENGINE}, {STATUS}, {PROBES} }} accept
         add rule inet chaos from iifname @dead drop
         add rule inet chaos to oifname @dead drop"
    );
    for rule in rules.lines() {
        must(&["nft", rule.trim()]);
    }
}

/// Something done to a link that waits for its moment: the programs that do it were started, because a phase may be over in less time than
/// that takes.
pub struct Charge(Vec<Waiting>);

impl Charge {
    fn new(programs: Vec<Waiting>) -> Self {
        Self(programs)
    }

    /// Does it; returns when it is done.
    pub fn fire(mut self) {
        for program in &mut self.0 {
            program.say();
        }
        for mut program in std::mem::take(&mut self.0) {
            let status = program.child.wait().unwrap();
            assert!(status.success(), "{}: {status}", program.words);
        }
    }
}

/// A program that does what it reads.
struct Waiting {
    child: Child,
    words: String,
}

impl Waiting {
    fn start(command: &[&str], words: &str) -> Self {
        let mut program = Command::new(command[0]);
        let child = program.args(&command[1..]).stdin(Stdio::piped()).spawn().unwrap_or_else(|error| panic!("{}: {error}", command[0]));
        Self { child, words: words.to_owned() }
    }

    fn say(&mut self) {
        self.child.stdin.take().unwrap().write_all(format!("{}\n", self.words).as_bytes()).unwrap();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // One that was not fired reads nothing, and does nothing.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The link of one pod.
pub struct Link {
    /// Name of its namespace.
    namespace: String,
    /// Our end.
    interface: String,
    pub address: Ipv4Addr,
}

impl Link {
    /// The link of pod `pod` of world `world`.
    pub fn new(world: usize, pod: usize) -> Self {
        let (namespace, interface) = (format!("w{world}p{pod}"), format!("h{world}p{pod}"));
        let address = Ipv4Addr::new(10, 77, u8::try_from(1 + world % 250).unwrap(), u8::try_from(10 + pod).unwrap());
        must(&["ip", "netns", "add", &namespace]);
        must(&["ip", "link", "add", &interface, "type", "veth", "peer", "name", "eth0", "netns", &namespace]);
        must(&["ip", "link", "set", &interface, "up"]);
        let inside = |words: &[&str]| must(&[&["ip", "-n", namespace.as_str()], words].concat());
        inside(&["link", "set", "lo", "up"]);
        inside(&["address", "add", &format!("{address}/32"), "dev", "eth0"]);
        inside(&["link", "set", "eth0", "up"]);
        inside(&["route", "add", &HERE.to_string(), "dev", "eth0"]);
        inside(&["route", "add", "default", "via", &HERE.to_string()]);
        must(&["ip", "route", "add", &format!("{address}/32"), "dev", &interface, "src", &HERE.to_string()]);
        Self { namespace, interface, address }
    }

    /// The namespace as a file.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.namespace)
    }

    /// Where the pod's agent listens.
    pub fn listening(&self) -> Vec<SocketAddr> {
        let output = Command::new("ip").args(["netns", "exec", &self.namespace, "ss", "-ltnH"]).stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let local = text.lines().filter_map(|line| line.split_whitespace().nth(3)?.rsplit(':').next()?.parse::<u16>().ok());
        local.filter(|port| *port != ENGINE).map(|port| SocketAddr::new(self.address.into(), port)).collect()
    }

    /// Loses everything, in both directions, from when it is fired.
    pub fn cut(&self) -> Charge {
        Charge::new(vec![Waiting::start(&["nft", "-f", "-"], &format!("add element inet chaos dead {{ {} }}", self.interface))])
    }

    /// Carries everything again, at full speed.
    pub fn mend(&self) {
        // Neither need be so: whatever was done to the link is undone.
        for words in [
            vec!["nft".to_owned(), format!("delete element inet chaos dead {{ {} }}", self.interface)],
            ["tc", "qdisc", "del", "dev", &self.interface, "root"].map(str::to_owned).to_vec(),
            ["tc", "-n", &self.namespace, "qdisc", "del", "dev", "eth0", "root"].map(str::to_owned).to_vec(),
        ] {
            let _ = Command::new(&words[0]).args(&words[1..]).stdin(Stdio::null()).stderr(Stdio::null()).status();
        }
    }

    /// Carries 8 Mbit/s in each direction, from when it is fired.
    pub fn slow(&self) -> Charge {
        let limit = |interface: &str| format!("qdisc replace dev {interface} root tbf rate 8mbit burst 32kb latency 300ms");
        Charge::new(vec![
            Waiting::start(&["tc", "-batch", "-"], &limit(&self.interface)),
            Waiting::start(&["tc", "-n", &self.namespace, "-batch", "-"], &limit("eth0")),
        ])
    }

    /// Carries some KB a second from now on, until it is repaired, so that a message takes a while.
    pub fn narrow(&self) {
        let words = "rate 64kbit burst 1600 latency 2000ms";
        let add = ["tc", "qdisc", "replace", "dev", &self.interface, "root", "tbf"];
        must(&[&add[..], &words.split(' ').collect::<Vec<_>>()].concat());
        // A short message fits into the first burst: this fills the queue for half a second, and no one reads it.
        let filler = UdpSocket::bind((HERE, 0)).unwrap();
        for _ in 0..4 {
            // One that finds no room is not needed.
            let _ = filler.send_to(&[0; 1_400], (self.address, 9));
        }
    }

    /// Resets every connection of the pod but those to engines and status pages, when it is fired.
    pub fn reset(&self) -> Charge {
        let filter = format!("( dst 10.77.0.0/16 and sport != :{ENGINE} and sport != :{STATUS} and sport != :{PROBES} )");
        let shell = format!("read -r go && exec ss --kill --tcp --no-header '{filter}' >/dev/null");
        Charge::new(vec![Waiting::start(&["ip", "netns", "exec", &self.namespace, "sh", "-c", &shell], "go")])
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.mend();
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).stderr(Stdio::null()).status();
    }
}
