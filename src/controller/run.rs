//! Starts and stops the controller: clients, authority, watches, enrolment server, lease, and the loop over objects. Only the holder of the
//! lease acts; a process that loses it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use kube::runtime::{applier, controller::Config};
use kube::{Api, Client};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::authority::{self, AuthorityError};
use super::calls::Calls;
use super::census::Census;
use super::counted::counted;
use super::events::Events;
use super::failures::Failures;
use super::launch::{Launcher, Recent};
use super::metrics::ControllerMetrics;
use super::objects::{Objects, World};
use super::reconcile::{ScopeContext, Shared, after_failure, reconcile};
use super::stores::{Scope, Stores, known_objects};
use super::token_review::Tokens;
use super::traces::{Traces, TracesError};
use super::ui::{Led, Ui};
use super::webhook::{self, Injection};
use crate::controller::lease::{Leadership, LeaseConfig, LeaseLost, LeaseManager};
use crate::inject::Options;
use weightsync_coordinator::{Directory, Enrollment, SingleUseTokens, keep_certified, router};
use weightsync_net::backoff::Backoff;
use weightsync_net::health::{self, Health};
use weightsync_net::https::{Access, AgentClient, Limits, serve_https, serve_plain};
use weightsync_net::identity::{Ca, IdentityError, PeerIdentity};
use weightsync_net::listen;
use weightsync_net::metrics::Metrics;

/// Lifetime of certificates. Agents renew after a third, so a controller may be away for 40 minutes; a stolen certificate ends soon.
const CERTIFICATES: Duration = Duration::from_secs(3600);
/// Lifetime of a token for an ephemeral agent: its image may have to be pulled first.
const TOKENS: Duration = Duration::from_secs(600);
/// Concurrent reconciles.
const CONCURRENCY: u16 = 16;
/// Reconciles under way have this long to end when the controller stops.
const DRAIN: Duration = Duration::from_secs(5);
const SWEEP: Duration = Duration::from_secs(2);

#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of this pod; holder of the lease.
    pub pod_name: String,
    /// Namespace of this pod: lease, authority.
    pub namespace: String,
    /// Name of the installation: lease, `NAME-ca`.
    pub name: String,
    /// Namespaces to watch; all if empty.
    pub watch_namespaces: Vec<String>,
    /// Image of ephemeral agents.
    pub agent_image: String,
    pub agent_image_pull_policy: String,
    /// URL of the enrolment server for agents.
    pub controller_url: String,
    pub enroll_address: SocketAddr,
    /// Listen address of health, metrics and the web page.
    pub status_address: SocketAddr,
    /// Listen address of probes only.
    pub probe_address: SocketAddr,
    pub ui: Ui,
    /// The webhook that injects; none where the cluster's policies do.
    pub webhook: Option<Injection>,
    /// The OpenTelemetry collector that gets traces of updates, as `http://HOST:4318`; none if empty.
    pub otlp_endpoint: String,
}

#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    #[error("no configuration of a cluster was found: {0}")]
    Configuration(#[from] kube::config::InferConfigError),
    #[error("no client can be made: {0}")]
    Client(#[from] kube::Error),
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    #[error(transparent)]
    Traces(#[from] TracesError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("does not lead any more: {0}")]
    LeaseLost(LeaseLost),
}

/// Runs a controller until `cancel`, or until the lease is lost.
pub async fn run(settings: Settings, cancel: CancellationToken) -> Result<(), ControllerError> {
    let config = kube::Config::infer().await?;
    let client = Client::try_from(config.clone())?;
    // Hidden retries could delay a renewal for longer than the lease lasts.
    let mut without_retries = config;
    without_retries.default_retry = false;
    let lease_client = Client::try_from(without_retries)?;
    // Bound first, so that an occupied port is reported at once.
    let listeners = Listeners {
        enroll: listen(settings.enroll_address)?,
        status: listen(settings.status_address)?,
        probes: listen(settings.probe_address)?,
    };
    let lease = LeaseConfig::new(&settings.name, &settings.pod_name);
    run_with(settings, lease, listeners, client, lease_client, cancel).await
}

pub(super) struct Listeners {
    pub(super) enroll: TcpListener,
    pub(super) status: TcpListener,
    pub(super) probes: TcpListener,
}

fn listen(address: SocketAddr) -> Result<TcpListener, ControllerError> {
    listen::listen(address).map_err(|source| ControllerError::Listen { address, source })
}

pub(super) async fn run_with(
    settings: Settings,
    lease: LeaseConfig,
    listeners: Listeners,
    client: Client,
    lease_client: Client,
    cancel: CancellationToken,
) -> Result<(), ControllerError> {
    let traces = Traces::start(&settings.otlp_endpoint, &settings.pod_name)?;
    let (registry, health) = (Metrics::default(), Health::default());
    let metrics = ControllerMetrics::new(&registry);
    let (client, lease_client) = (counted(client, &metrics), counted(lease_client, &metrics));
    let calls = Calls;
    let page = Led::default();
    let stop = CancellationToken::new();
    let _servers_end = stop.clone().drop_guard();
    let status_pages = health::router(health.clone(), registry.clone()).merge(page.router(settings.ui, &settings.pod_name));
    let _status = AbortOnDropHandle::new(tokio::spawn(serve_plain(listeners.status, status_pages, Limits::pages(), stop.clone())));
    let probes = health::probes(health.clone());
    let _probes = AbortOnDropHandle::new(tokio::spawn(serve_plain(listeners.probes, probes, Limits::probes(), stop.clone())));

    let stores = Stores::start(&client, &settings.watch_namespaces, &metrics);
    let synced = Arc::new(AtomicBool::new(false));
    let listed = synced.clone();
    health.ready_while("watches", move || {
        if listed.load(Ordering::SeqCst) { Ok(()) } else { Err("the first list of objects and pods is not complete".into()) }
    });

    let Some(ca) = authority_of(&settings, &client, calls, &cancel).await? else { return Ok(()) };
    let ca = Arc::new(ca);
    let identity = ca.issue(&PeerIdentity::Controller, CERTIFICATES)?;
    let _renewal =
        AbortOnDropHandle::new(tokio::spawn(keep_certified(ca.clone(), identity.clone(), PeerIdentity::Controller, CERTIFICATES)));

    let (directory, tokens) = (Directory::default(), SingleUseTokens::new(TOKENS));
    let enrollment = Arc::new(Enrollment {
        ca: ca.clone(),
        verifier: Arc::new(Tokens::new(client.clone(), calls, tokens.clone())),
        directory: directory.clone(),
        lifetime: CERTIFICATES,
    });
    let (mut enrolls, limits) = (router(enrollment), Limits::enrollment());
    // Before it leads: every controller answers the API server.
    let _served = settings.webhook.as_ref().map(|webhook| {
        let served = webhook::Served {
            folder: webhook.certificate.clone(),
            name: format!("{}.{}.svc", settings.name, settings.namespace),
            configuration: format!("{}-inject", settings.name),
        };
        AbortOnDropHandle::new(tokio::spawn(webhook::keep(served, identity.clone(), client.clone(), calls, metrics.clone())))
    });
    if let Some(webhook) = &settings.webhook {
        enrolls = enrolls.merge(webhook::router(options(&settings, webhook, &ca)));
    }
    let enrolling = serve_https(listeners.enroll, identity.clone(), Access::Open, enrolls, limits, stop.clone());
    let _enrolling = AbortOnDropHandle::new(tokio::spawn(enrolling));

    let watching = synced.clone();
    let all_listed = async {
        let done = stores.synced().await;
        watching.store(done, Ordering::SeqCst);
    };
    tokio::select! {
        () = cancel.cancelled() => return Ok(()),
        () = all_listed => {}
    }

    let failures = metrics.lease_failures.clone();
    let leases: Api<Lease> = Api::namespaced(lease_client, &settings.namespace);
    let manager = LeaseManager::new(leases, lease).above(stores.highest_term()).count_failures(move || {
        failures.inc();
    });
    let mut leadership = manager.leadership();
    let stop_lease = CancellationToken::new();
    let leasing = tokio::spawn(keep_lease(manager, stop_lease.clone()));
    let led = tokio::select! {
        () = cancel.cancelled() => None,
        term = leadership.acquired() => term,
    };
    let mut ended_by_itself = false;
    if led.is_some() {
        metrics.leader.set(1);
        let judged = leadership.clone();
        health.live_while("lease", move || if judged.term().is_some() { Ok(()) } else { Err("does not lead any more".into()) });
        let world = World {
            client: client.clone(),
            calls,
            agents: AgentClient::new(identity),
            directory: directory.clone(),
            events: Events::start(client.clone(), settings.pod_name.clone(), metrics.clone()),
            leadership: leadership.clone(),
            metrics: metrics.clone(),
            traces: traces.clone(),
            cancel: stop.clone(),
        };
        let objects = Arc::new(Objects::new(world));
        let stolen = Arc::downgrade(&objects);
        tokens.on_theft(move |pod| {
            if let Some(objects) = stolen.upgrade() {
                objects.token_stolen(pod);
            }
        });
        registry.collect(Census(objects.clone()));
        page.lead(&objects);
        let shared = Arc::new(Shared {
            client,
            calls,
            objects,
            launcher: Launcher {
                image: settings.agent_image,
                pull_policy: settings.agent_image_pull_policy,
                controller_url: settings.controller_url,
                controller_ca: ca.certificate_pem().to_owned(),
                tokens,
                recent: Recent::default(),
            },
            leadership: leadership.clone(),
            metrics: metrics.clone(),
            failures: Failures::default(),
        });
        ended_by_itself = lead(&shared, &stores.scopes, &directory, leadership, &cancel).await;
        metrics.leader.set(0);
    }
    stop.cancel();
    stop_lease.cancel();
    match timeout(DRAIN, leasing).await {
        // This task and the lease's task both see the claim's end; the second one must not turn it into a clean exit.
        Ok(Ok(LeaseLost::Stopped)) | Err(_) if ended_by_itself => {
            Err(ControllerError::LeaseLost(LeaseLost::NotRenewed("the claim ended before the response to a renewal".into())))
        }
        Ok(Ok(LeaseLost::Stopped)) | Err(_) => Ok(()),
        Ok(Ok(lost)) => Err(ControllerError::LeaseLost(lost)),
        Ok(Err(error)) => Err(ControllerError::LeaseLost(LeaseLost::NotRenewed(error.to_string()))),
    }
}

/// What the webhook writes: the image and URL are those of ephemeral agents.
fn options(settings: &Settings, webhook: &Injection, ca: &Ca) -> Options {
    let lines = &webhook.lines;
    Options {
        image: settings.agent_image.clone(),
        image_pull_policy: settings.agent_image_pull_policy.clone(),
        controller_url: settings.controller_url.clone(),
        controller_ca: ca.certificate_pem().to_owned(),
        resources: lines.resources.clone(),
        shared_memory: lines.shared_memory.clone(),
        image_pull_secrets: lines.image_pull_secrets.clone(),
    }
}

/// The authority; `None` if the process is stopped. The API server may not be up yet when a whole cluster starts.
async fn authority_of(
    settings: &Settings,
    client: &Client,
    calls: Calls,
    cancel: &CancellationToken,
) -> Result<Option<Ca>, ControllerError> {
    let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(10));
    loop {
        match authority::load(client, calls, &settings.namespace, &settings.name).await {
            Ok(ca) => return Ok(Some(ca)),
            Err(error @ AuthorityError::Unusable { .. }) => return Err(error.into()),
            Err(error) => tracing::warn!(%error, "no authority yet"),
        }
        tokio::select! {
            () = cancel.cancelled() => return Ok(None),
            () = sleep(backoff.failed()) => {}
        }
    }
}

/// Keeps the lease, and releases it if it was kept to the end.
async fn keep_lease(mut manager: LeaseManager, stop: CancellationToken) -> LeaseLost {
    let lost = manager.run(&stop).await;
    if lost == LeaseLost::Stopped {
        manager.release().await;
    }
    lost
}

/// Reconciles objects until the process is stopped, or until leadership ends: true for the latter.
async fn lead(
    shared: &Arc<Shared>,
    scopes: &[Scope],
    directory: &Directory,
    mut leadership: Leadership,
    cancel: &CancellationToken,
) -> bool {
    let contexts: Vec<Arc<ScopeContext>> =
        scopes.iter().map(|scope| Arc::new(ScopeContext { shared: shared.clone(), scope: scope.clone() })).collect();
    adopt(&contexts, directory);
    let sweeping = sweep(shared, scopes);
    let draining = CancellationToken::new();
    let mut loops = JoinSet::new();
    for context in contexts {
        loops.spawn(look_at_objects(context, draining.clone()));
    }
    let lost = tokio::select! {
        () = cancel.cancelled() => {
            draining.cancel();
            let ended = async { while loops.join_next().await.is_some() {} };
            if timeout(DRAIN, ended).await.is_err() {
                tracing::warn!("aborting reconciles that still run");
            }
            shared.objects.drained().await;
            false
        }
        // Running reconciles would act without leadership: drop them, do not drain.
        () = leadership.lost() => {
            tracing::error!("leadership ended; this process exits");
            true
        }
        () = sweeping => false,
    };
    directory.unsettle();
    lost
}

/// Starts the coordinators of all objects; only then may the enrolment server answer that a pod is not claimed.
fn adopt(contexts: &[Arc<ScopeContext>], directory: &Directory) {
    for context in contexts {
        for object in context.scope.objects.state() {
            let Some(term) = context.shared.leadership.term() else { continue };
            match &object.0 {
                Ok(readable) => {
                    let (decided, _) = context.decide(readable);
                    context.shared.objects.follow(&Arc::new(readable.clone()), &decided, term, &context.scope);
                }
                Err(unreadable) => context.shared.objects.hold_unreadable(unreadable),
            }
            context.scope.triggers.push(kube::runtime::reflector::ObjectRef::from_obj(&*object));
        }
    }
    directory.settle();
}

async fn look_at_objects(context: Arc<ScopeContext>, draining: CancellationToken) {
    let queue = Box::pin(context.scope.triggers.clone().stream().take_until(draining.cancelled_owned()));
    let config = Config::default().concurrency(CONCURRENCY);
    let store = context.scope.objects.clone();
    let results = applier(|object, context| Box::pin(reconcile(object, context)), after_failure, context, store, queue, config);
    let mut results = std::pin::pin!(results);
    while let Some(result) = results.next().await {
        if let Err(error) = result {
            // Failures were counted and reported where they happened. The rest are deleted objects, which the sweep handles.
            tracing::debug!(%error, "not reconciled");
        }
    }
}

async fn sweep(shared: &Arc<Shared>, scopes: &[Scope]) {
    let mut ticks = interval(SWEEP);
    loop {
        ticks.tick().await;
        let there = known_objects(scopes);
        shared.objects.sweep(&there, scopes);
        shared.failures.forget_gone(&there);
    }
}
