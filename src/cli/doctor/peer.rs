//! One edge without a cluster: `--listen` answers, `--peer` measures, over TCP and with the code of a group's pre-flight.
//!
//! There is no agent, so neither end authenticates: the listening one accepts bytes of every sender, checks their digests, and keeps none.
//! It says nothing about reads through NIXL or NCCL.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::json;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout};

use crate::cli::Output;
use weightsync_agent::edge::{ProbeStore, measure};
use weightsync_core::plan::{show_bytes, show_rate};
use weightsync_core::protocol::{
    DataHello, EdgeFigures, EdgeOutcome, EpochId, LONGEST_MEASUREMENT, MemberName, Refusal, RefusalCode, UpdateId,
};
use weightsync_net::identity::PeerIdentity;
use weightsync_net::listen::{self, everywhere};
use weightsync_transport::tcp::{TcpOptions, TcpTransport};
use weightsync_transport::{Admission, BucketStore, Transport};

/// The measurement takes no longer.
const LIMIT: Duration = Duration::from_secs(20);
/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Connections of which the fastest gives the round trip.
const ROUND_TRIPS: usize = 5;
/// Stands for an object in the messages of this program.
const DOCTOR: &str = "doctor";

/// Takes measurements of `--peer` only.
struct Counterpart;

impl Admission for Counterpart {
    fn admit(&self, hello: &DataHello, _: Option<&PeerIdentity>) -> Result<Arc<dyn BucketStore>, Refusal> {
        if hello.preflight && hello.rest.is_empty() && hello.update.epoch.weightsync == DOCTOR {
            return Ok(Arc::new(ProbeStore::new(LONGEST_MEASUREMENT)));
        }
        let message = "weightsync doctor --listen takes measurements of weightsync doctor --peer only".to_owned();
        Err(Refusal { code: RefusalCode::Forbidden, message })
    }
}

fn bind(port: u16) -> anyhow::Result<TcpTransport> {
    Ok(TcpTransport::on(listen::listen(everywhere(port))?, Arc::new(Counterpart), TcpOptions::default())?)
}

/// Answers measurements at that port until interrupted.
pub(super) async fn listen(port: u16) -> anyhow::Result<ExitCode> {
    let transport = bind(port).with_context(|| format!("cannot listen on port {port}: choose another one with --listen"))?;
    let port = transport.address().rsplit(':').next().unwrap_or_default().to_owned();
    println!("listening on port {port}; on the other host: weightsync doctor --peer ADDRESS-OF-THIS-HOST:{port}");
    tokio::signal::ctrl_c().await.context("the end cannot be waited for")?;
    Ok(ExitCode::SUCCESS)
}

/// Measures the way to a listening one; exit code 1 when it does not carry bytes.
pub(super) async fn ask(peer: &str, output: Output) -> anyhow::Result<ExitCode> {
    let found = timeout(CONNECT, lookup_host(peer)).await.context("the name was not resolved in time")?;
    let found = found.with_context(|| format!("{peer} is no HOST:PORT that can be resolved"))?.next();
    let address = found.with_context(|| format!("{peer} has no address"))?;
    let mut round_trip = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        let begun = Instant::now();
        let connected = timeout(CONNECT, TcpStream::connect(address)).await;
        let hint = || format!("{address} cannot be reached: does weightsync doctor --listen run there, and is the port open?");
        connected.with_context(hint)?.with_context(hint)?;
        round_trip = round_trip.min(begun.elapsed());
    }
    let transport = bind(0)?;
    let epoch = EpochId { weightsync: DOCTOR.to_owned(), created: 1, term: 1, epoch: 1 };
    let hello = DataHello {
        update: UpdateId { epoch, version: 0, attempt: 0 },
        from: MemberName("this host".to_owned()),
        to: MemberName(peer.to_owned()),
        secret: String::new(),
        rest: Vec::new(),
        tls: false,
        silence_ms: 5_000,
        probe: true,
        preflight: true,
        carried: None,
    };
    match measure(&transport, &hello, &address.to_string(), LIMIT).await {
        EdgeOutcome::Verified(figures) => {
            let us = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
            show(peer, &EdgeFigures { round_trip_us: Some(us), ..figures }, output);
            Ok(ExitCode::SUCCESS)
        }
        EdgeOutcome::Broken { cause } => bail!("the way to {peer} does not carry bytes: {cause}"),
        EdgeOutcome::Unmeasured { cause } => bail!("{peer} does not let itself be measured: {cause}"),
    }
}

fn show(peer: &str, figures: &EdgeFigures, output: Output) {
    let EdgeFigures { bytes, round_trip_us, mtu, .. } = figures;
    let us = round_trip_us.unwrap_or_default();
    match output {
        Output::Json => {
            let rate = figures.rate();
            println!(
                "{}",
                json!({"peer": peer, "transport": "tcp", "bytes": bytes, "bytesPerSecond": rate, "roundTripMicroseconds": us, "mtu": mtu})
            );
        }
        Output::Human => {
            let mtu = mtu.map_or_else(|| "?".to_owned(), |mtu| mtu.to_string());
            let (bytes, rate) = (show_bytes(*bytes), show_rate(figures.rate()));
            println!("{peer}: {rate} over TCP ({bytes}, every digest agrees), round trip {us} us, MTU {mtu}");
        }
    }
}
