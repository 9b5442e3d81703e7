//! The endpoints of one claim: each engine of the pod has a task of its own, from its endpoint's begin to its end.
//!
//! Decides which engines have an endpoint, and how one ends. What fails or takes long at one engine concerns that one. A registered engine
//! keeps its endpoint as long as its registration lasts: an assignment can only add one, because a new controller knows none at first. Every
//! engine leaves by one door: it is released and watched until it may serve or is gone. It decides nothing about groups or versions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::endpoint::{Claim, EngineAt, Placed, Session, StartFailed, Watched, join};
use super::pages::Pages;
use crate::client::{ClientServer, ClientServerConfig};
use crate::enrollment::AnnouncingEnded;
use crate::registry::{Registry, Reporter};
use crate::rollout::Rollout;
use weightsync_core::protocol::{Assignment, Role};
use weightsync_net::backoff::Backoff;

/// How long an engine that is being switched holds up the end of its endpoint.
const SWITCHING: Duration = Duration::from_secs(20);

/// Between two attempts to put back an engine that left.
const PUT_BACK_AGAIN: Duration = Duration::from_secs(5);

/// What the task of an engine does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Order {
    /// Keep its endpoint.
    Serve,
    /// Its registration ended: release it, and watch it until it may serve or is gone.
    Leave,
    /// No object claims the pod, with the reason: release it, and watch it on.
    Unclaimed(String),
    /// The claim changed: end the endpoint, and watch the engine on.
    Rest,
    /// End all.
    End,
}

/// The endpoints of one claim.
pub(super) struct Running {
    claim: Arc<Claim>,
    source: Option<Placed>,
    engines: BTreeMap<u16, Kept>,
    /// Where engines register, if the object wants those, and the reports of them.
    registering: Registering,
    cancel: CancellationToken,
}

#[derive(Default)]
struct Registering {
    tasks: JoinSet<()>,
    cancel: CancellationToken,
}

/// The task of one engine.
struct Kept {
    wanted: EngineAt,
    number: u16,
    orders: watch::Sender<Order>,
    task: JoinHandle<Option<Watched>>,
}

/// The engines of a claim that is over. They are watched until the next one.
#[derive(Default)]
pub(super) struct Resting {
    watched: Vec<Watched>,
    registry: Option<Arc<Registry>>,
    registering: Registering,
}

impl Running {
    /// Starts what the object wants. The endpoint of an engine that cannot start yet is tried again, without the others.
    pub(super) async fn start(
        session: &Arc<Session>,
        assignment: &Assignment,
        pages: &Arc<Pages>,
        cancel: &CancellationToken,
    ) -> Result<Self, StartFailed> {
        let registered = assignment.role == Role::Rollout && assignment.registered;
        if assignment.role == Role::Rollout && !registered && assignment.engines.is_empty() {
            return Err(StartFailed::NoEngine);
        }
        let claim = Arc::new(Claim {
            assignment: watch::Sender::new(assignment.clone()),
            unclaimed: watch::Sender::new(None),
            registry: registered.then(|| Registry::new(session.settings.ip)),
            endpoints: Mutex::default(),
        });
        let mut running =
            Self { claim, source: None, engines: BTreeMap::new(), registering: Registering::default(), cancel: cancel.clone() };
        match assignment.role {
            Role::Source => running.source = Some(session.open(&running.claim, 0, None, pages, cancel.child_token()).await?.0),
            Role::Rollout => {
                running.let_engines_register(session, pages)?;
                running.follow(session, pages);
            }
        }
        Ok(running)
    }

    pub(super) fn claim(&self) -> &Arc<Claim> {
        &self.claim
    }

    /// Waits until an engine registers or a registration ends; for ever where none may register.
    pub(super) fn registrations(&self) -> impl Future<Output = ()> + use<> {
        changes(self.claim.registry.clone())
    }

    /// Has the endpoints of engines that are gone end, and starts those of new ones.
    pub(super) fn follow(&mut self, session: &Arc<Session>, pages: &Arc<Pages>) {
        let wanted = self.wanted();
        for (port, kept) in &self.engines {
            if wanted.get(port) != Some(&kept.wanted) {
                kept.orders.send_if_modified(|order| {
                    let serves = *order == Order::Serve;
                    if serves {
                        *order = Order::Leave;
                    }
                    serves
                });
            }
        }
        self.engines.retain(|_, kept| !kept.task.is_finished());
        for (port, engine) in wanted {
            let before = match self.engines.get(&port) {
                Some(kept) if *kept.orders.borrow() == Order::Serve => continue,
                _ => self.engines.remove(&port),
            };
            let before = before.map(|kept| {
                // The next endpoint takes care of what the engine holds.
                kept.orders.send_replace(Order::End);
                kept.task
            });
            let number = (0..=u16::MAX).find(|number| self.engines.values().all(|kept| kept.number != *number)).unwrap_or(0);
            let (orders, ordered) = watch::channel(Order::Serve);
            let cancel = self.cancel.child_token();
            let attended = Attended { session: session.clone(), claim: self.claim.clone(), pages: pages.clone(), number, cancel };
            let task = tokio::spawn(attended.run(engine.clone(), before, ordered));
            self.engines.insert(port, Kept { wanted: engine, number, orders, task });
        }
    }

    /// The engines that are to have an endpoint: those of the assignment, or those that are registered and that it allowed once.
    fn wanted(&self) -> BTreeMap<u16, EngineAt> {
        let assigned = self.claim.assignment.borrow().engines.clone();
        let Some(registry) = &self.claim.registry else {
            return assigned.into_iter().map(|engine| (engine.port, EngineAt { engine, registered: None })).collect();
        };
        let engine = |port| {
            let named = assigned.iter().find(|engine| engine.port == port);
            let kept = || self.engines.get(&port).map(|kept| &kept.wanted.engine);
            let engine = named.or_else(kept)?.clone();
            Some((port, EngineAt { engine, registered: registry.of(port) }))
        };
        registry.ports().into_iter().filter_map(engine).collect()
    }

    /// Opens the socket where engines register, and reports them to the controller.
    fn let_engines_register(&mut self, session: &Session, pages: &Pages) -> Result<(), StartFailed> {
        let Some(registry) = &self.claim.registry else { return Ok(()) };
        let settings = &session.settings;
        let socket = ClientServerConfig { engines: Some(registry.clone()), ..settings.socket.clone() };
        let server = ClientServer::bind(socket, session.queue.clone(), session.roster.subscribe())?;
        self.registering.tasks.spawn(server.run(self.registering.cancel.clone()));
        let reporter = Reporter {
            client: session.client.clone(),
            namespace: settings.applicant.namespace.clone(),
            incarnation: settings.applicant.incarnation.clone(),
            registry: registry.clone(),
            assignment: self.claim.assignment.clone(),
        };
        let (claim, over) = (self.claim.clone(), self.cancel.clone());
        self.registering.tasks.spawn(async move {
            if let AnnouncingEnded::Unclaimed { message } = reporter.run(over).await {
                claim.unclaimed.send_replace(Some(message));
            }
        });
        pages.engines_register();
        Ok(())
    }

    /// Ends the claim as `order` says, which is one for all engines. An engine that is being switched has so long to end that.
    pub(super) async fn end(mut self, order: Order) -> Resting {
        if let (Order::Unclaimed(message), Some(source)) = (&order, &self.source) {
            source.endpoint.core.unclaimed(message);
        }
        for kept in self.engines.values() {
            kept.orders.send_replace(order.clone());
        }
        let mut resting = Resting { registry: self.claim.registry.clone(), ..Resting::default() };
        for kept in self.engines.into_values() {
            resting.watched.extend(kept.task.await.ok().flatten());
        }
        self.cancel.cancel();
        if let Some(source) = self.source.take() {
            source.close().await;
        }
        resting.registering = self.registering;
        if order == Order::End {
            resting.end().await;
            return Resting::default();
        }
        resting
    }
}

impl Resting {
    /// Follows registrations without a claim: an engine whose registration ended does not count for the pod any more. Never returns.
    pub(super) async fn follow(&mut self, pages: &Pages) {
        let Some(registry) = self.registry.clone() else { return std::future::pending().await };
        loop {
            // From before the look: a change right after it is not missed.
            let changed = changes(Some(registry.clone()));
            let ports = registry.ports();
            let (stay, gone) = std::mem::take(&mut self.watched).into_iter().partition(|watched| ports.contains(&watched.rollout.port()));
            self.watched = stay;
            for watched in gone {
                pages.remove(&watched.rollout);
                watched.end().await;
            }
            changed.await;
        }
    }

    /// Ends the watch: the next claim takes the engines over.
    pub(super) async fn end(mut self) {
        for watched in self.watched {
            watched.end().await;
        }
        self.registering.cancel.cancel();
        join(&mut self.registering.tasks).await;
    }
}

/// Waits for a change of the registered engines; for ever without a registry.
fn changes(registry: Option<Arc<Registry>>) -> impl Future<Output = ()> {
    let changes = registry.map(|registry| registry.changes());
    async move {
        let Some(mut changes) = changes else { return std::future::pending().await };
        if changes.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// What the task of an engine works with.
struct Attended {
    session: Arc<Session>,
    claim: Arc<Claim>,
    pages: Arc<Pages>,
    number: u16,
    cancel: CancellationToken,
}

impl Attended {
    /// Keeps the endpoint of an engine as it is ordered to. `before` is the task of an earlier endpoint of that port: two would give one engine
    /// orders that contradict each other. Returns the watch over the engine where that goes on.
    async fn run(
        self,
        wanted: EngineAt,
        before: Option<JoinHandle<Option<Watched>>>,
        mut orders: watch::Receiver<Order>,
    ) -> Option<Watched> {
        if let Some(before) = before
            && let Ok(Some(watched)) = before.await
        {
            self.pages.remove(&watched.rollout);
            watched.end().await;
        }
        let (placed, watched) = self.open(&wanted, &mut orders).await?;
        let order = ordered(&mut orders).await;
        if let Order::Unclaimed(message) = &order {
            placed.endpoint.core.unclaimed(message);
            watched.rollout.release().await;
        }
        if order != Order::Leave {
            watched.rollout.settled(SWITCHING).await;
            placed.close().await;
            if order == Order::End {
                watched.end().await;
                return None;
            }
            return Some(watched);
        }
        self.pages.leaves(&watched.rollout);
        placed.endpoint.core.unclaimed("the registration of the engine ended");
        placed.close().await;
        put_back(&watched.rollout, &mut orders).await;
        watched.rollout.settled(SWITCHING).await;
        if matches!(*orders.borrow(), Order::Unclaimed(_) | Order::Rest) {
            return Some(watched);
        }
        self.pages.remove(&watched.rollout);
        watched.end().await;
        None
    }

    /// Tries until the endpoint has started; none when it is not wanted any more.
    async fn open(&self, wanted: &EngineAt, orders: &mut watch::Receiver<Order>) -> Option<(Placed, Watched)> {
        let port = wanted.engine.port;
        let mut backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));
        loop {
            match self.session.open(&self.claim, self.number, Some(wanted), &self.pages, self.cancel.clone()).await {
                Ok((placed, watched)) => {
                    self.pages.started(port);
                    return Some((placed, watched?));
                }
                Err(error) => {
                    tracing::error!(port, %error, "the endpoint of an engine cannot start, trying again");
                    self.pages.cannot_start(port, error.to_string());
                }
            }
            tokio::select! {
                () = sleep(backoff.failed()) => {}
                _ordered = ordered(orders) => {
                    self.pages.started(port);
                    return None;
                }
            }
        }
    }
}

/// Waits for another order than to serve.
async fn ordered(orders: &mut watch::Receiver<Order>) -> Order {
    orders.wait_for(|order| *order != Order::Serve).await.map_or(Order::End, |order| order.clone())
}

/// Releases an engine, and tries again until it may serve, is gone, or there is another order.
async fn put_back(rollout: &Arc<Rollout>, orders: &mut watch::Receiver<Order>) {
    loop {
        rollout.release().await;
        if !rollout.must_stay_out() {
            return;
        }
        let other = orders.wait_for(|order| *order != Order::Leave);
        if tokio::time::timeout(PUT_BACK_AGAIN, other).await.is_ok() {
            return;
        }
    }
}
