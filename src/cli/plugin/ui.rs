//! `kubectl weightsync ui`: forwards the web page of the leading controller to this machine, through the API server.
//!
//! It listens on the loopback interface only, and ends when it is interrupted.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::agents::{CONTROLLER_STATUS, operator};
use super::cluster::ClusterArgs;
use super::forward::open;
use weightsync_agent::command::Output;

#[derive(Debug, Args)]
pub struct UiArgs {
    /// The cluster.
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Local port; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Namespace of the operator. Default: searched.
    #[arg(long)]
    operator_namespace: Option<String>,
    /// Output format of the address.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl UiArgs {
    pub fn run(self) -> anyhow::Result<ExitCode> {
        crate::cli::block_on(async {
            let access = self.cluster.access().await?;
            let operator = operator(&access.client, self.operator_namespace.as_deref()).await?;
            let pod = operator.leader(&access.client).await?;
            let pods: Api<Pod> = Api::namespaced(access.client.clone(), &operator.namespace);
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
            let listener = TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
            let url = format!("http://{}/ui/", listener.local_addr()?);
            match self.output {
                Output::Human => println!("{url} shows the state of {pod}; stop with Ctrl-C"),
                Output::Json => println!("{}", json!({"url": url, "pod": pod})),
            }
            let mut connections = JoinSet::new();
            loop {
                while connections.try_join_next().is_some() {}
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = tokio::signal::ctrl_c() => return Ok(ExitCode::SUCCESS),
                };
                match accepted {
                    Ok((stream, _)) => {
                        connections.spawn(pass_on(pods.clone(), pod.clone(), stream));
                    }
                    Err(error) => {
                        eprintln!("a connection cannot be taken: {error}");
                        sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        })
    }
}

async fn pass_on(pods: Api<Pod>, pod: String, mut near: TcpStream) {
    match open(&pods, &pod, CONTROLLER_STATUS).await {
        // Either side may close at any time.
        Ok(mut far) => drop(copy_bidirectional(&mut near, &mut far).await),
        Err(error) => eprintln!("error: {error:#}"),
    }
}
