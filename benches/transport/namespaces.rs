//! Hosts as network namespaces on one bridge, every link shaped to one rate in both directions.

use std::process::Command;

use anyhow::{Result, bail};

/// Removed, with all that is in it, when dropped.
pub struct Network {
    switch: String,
    pub hosts: Vec<Host>,
}

/// A host of the network.
pub struct Host {
    namespace: String,
    pub address: String,
    /// What starts a program there.
    pub prefix: Vec<String>,
}

impl Network {
    pub fn new(hosts: u8, mbit: u32) -> Result<Self> {
        let own = std::process::id();
        let mut network = Self { switch: format!("wsbench-{own}-switch"), hosts: Vec::new() };
        let switch = network.switch.clone();
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", "br0", "up"])?;
        for number in 0..hosts {
            let (name, port, address) = (format!("wsbench-{own}-{number}"), format!("port{number}"), format!("10.77.0.{}", number + 1));
            ip(&["netns", "add", &name])?;
            let prefix = ["ip", "netns", "exec", &name].map(str::to_owned).to_vec();
            network.hosts.push(Host { namespace: name.clone(), address: address.clone(), prefix });
            ip(&["-n", &switch, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &name])?;
            ip(&["-n", &switch, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &name, "addr", "add", &format!("{address}/24"), "dev", "eth0"])?;
            ip(&["-n", &name, "link", "set", "eth0", "up"])?;
            ip(&["-n", &name, "link", "set", "lo", "up"])?;
            shape(&switch, &port, mbit)?;
            shape(&name, "eth0", mbit)?;
        }
        Ok(network)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in self.hosts.iter().map(|host| &host.namespace).chain([&self.switch]) {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn shape(namespace: &str, device: &str, mbit: u32) -> Result<()> {
    let rate = format!("{mbit}mbit");
    run(Command::new("tc")
        .args(["-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", &rate])
        .args(["burst", "256kb", "latency", "20ms"]))
}

fn ip(arguments: &[&str]) -> Result<()> {
    run(Command::new("ip").args(arguments))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    if !output.status.success() {
        bail!("{command:?}: {} (root and iproute2 are needed)", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
