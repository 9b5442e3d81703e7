//! One hop on the loopback device inside TLS against the same hop in plain, one after the other, several times.
//!
//! The certificates and settings of TLS are those of agents: both sides show one, TLS 1.3, nothing resumed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls_pki_types::ServerName;
use weightsync_core::protocol::Role;
use weightsync_net::identity::{Ca, ClientCertificates, PeerIdentity, agent_name};
use weightsync_transport::tcp::DataTls;

use crate::processes::{Node, OneHop, Sent, gigabytes, send};
use crate::report::{Report, median};

/// Who leaders and members are in their certificates.
const POD: &str = "bench";
/// Certificates outlive every measurement.
const LIFETIME: Duration = Duration::from_hours(1);

pub fn measure(settings: &OneHop, runs: usize, report: &mut Report) -> Result<()> {
    let bytes = settings.gib << 30;
    let folder = tempfile::tempdir()?;
    make_authority(folder.path())?;
    let authority = ["--authority".to_owned(), folder.path().to_string_lossy().into_owned()];
    let secured = [authority.as_slice(), &settings.tuning].concat();
    // A member that knows the authority takes streams of both kinds.
    let member = [Node::start(&[], "127.0.0.1:0", &secured)?];
    let (mut plain, mut inside) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        plain.push(send(&[], &member, bytes, &settings.tuning)?);
        inside.push(send(&[], &member, bytes, &secured)?);
    }
    let speeds = |sent: &[Sent]| sent.iter().map(|sent| gigabytes(bytes) / sent.seconds).collect::<Vec<_>>();
    let what = format!("loopback, one hop of {} GiB, digest on", settings.gib);
    report.compare(&what, "GB/s", ("inside TLS", &speeds(&inside)), ("plain", &speeds(&plain)), "for comparison");
    let cost = |sent: &[Sent], side: fn(&Sent) -> f64| median(&sent.iter().map(side).collect::<Vec<_>>()) * 1e3 / gigabytes(bytes);
    let row =
        |name: &str, side: fn(&Sent) -> f64| (name.to_owned(), vec![("plain", cost(&plain, side)), ("inside TLS", cost(&inside, side))]);
    report.table("processor time of that hop", "ms a GB", &[row("sender", |sent| sent.leader), row("receiver", |sent| sent.members)]);
    Ok(())
}

/// An authority that processes of one measurement share, in a folder that they alone read.
fn make_authority(folder: &Path) -> Result<()> {
    let authority = Ca::generate()?;
    std::fs::write(folder.join("ca.pem"), authority.certificate_pem())?;
    std::fs::write(folder.join("ca.key"), authority.key_pem())?;
    Ok(())
}

/// TLS of the data path for a process of that authority.
pub fn settings(folder: &Path) -> Result<DataTls> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).with_context(|| format!("{}/{name}", folder.display()));
    let authority = Ca::from_pem(&read("ca.pem")?, &read("ca.key")?)?;
    let who = PeerIdentity::Agent { weightsync: POD.to_owned(), pod_uid: POD.to_owned(), role: Role::Rollout };
    let identity = authority.issue(&who, LIFETIME)?;
    let server = identity.server_config(ClientCertificates::Required)?;
    Ok(DataTls::one_name(server, identity.client_config()?.into(), ServerName::try_from(agent_name(POD))?))
}
