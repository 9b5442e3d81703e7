//! One run with so many objects: start, updates, changes of pods, rest, restart.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use weightsync_net::identity::Ca;

use super::Arguments;
use super::agent::Agent;
use super::controller::{Controller, Ports, Reading};
use super::fill::{Extent, Place, fill, object_name};
use super::plane::Plane;
use super::report::median;
use super::statuses::Statuses;
use super::update::Group;

/// Everything is as wanted within this long.
const LONG: Duration = Duration::from_secs(600);
/// What trails after a change is over after this long.
const SETTLE: Duration = Duration::from_secs(5);
/// Pods that are changed in the run about them.
const CHANGES: usize = 50;

type Row = Vec<(&'static str, f64)>;

/// What one run found.
#[derive(Default)]
pub struct Figures {
    pub start: Row,
    pub restart: Row,
    pub updates: Row,
    pub pods: Row,
    pub idle: Row,
    pub memory: Row,
    /// Requests by kind, until the start's end, for each object.
    pub at_start: Vec<(String, f64)>,
    /// Requests by kind, for each update.
    pub answered: Vec<(String, f64)>,
}

struct Run<'a> {
    extent: Extent,
    arguments: &'a Arguments,
    plane: Plane,
    statuses: Statuses,
    groups: Vec<Group>,
}

fn say(what: &str) {
    eprintln!("{what}");
}

/// Measures with `extent.objects` objects.
pub async fn measure(extent: Extent, arguments: &Arguments) -> Result<Figures> {
    say(&format!("{} objects: making {} pods", extent.objects, extent.pods()));
    let plane = Plane::start().await?;
    let ca = Ca::generate()?;
    let mut places = fill(&plane.client, extent, &ca).await?;
    places.sort_by(|one, two| (one.object, one.role, &one.pod).cmp(&(two.object, two.role, &two.pod)));
    let example = places.iter().step_by(1 + extent.rollouts).map(|place| (place.namespace.clone(), place.pod.clone())).collect();

    let (ports, ca_pem, cancel) = (Ports::free()?, Arc::<str>::from(ca.certificate_pem()), CancellationToken::new());
    let _end = cancel.clone().drop_guard();
    let groups = start_agents(places, Duration::from_secs(arguments.arrive), &ports.enroll(), &ca_pem, &cancel);
    let run = Run { extent, arguments, statuses: Statuses::watch(&plane.client), plane, groups };
    let mut figures = Figures::default();

    let before = Reading { requests: run.plane.requests().await?, ..Reading::default() };
    let controller = Controller::start(&run.plane, ports, arguments.program.as_deref(), 1)?;
    let took = run.whole(&controller, "Ready").await?;
    sleep(SETTLE).await;
    let started = controller.read(&run.plane).await?;
    figures.start = run.beginning(took, &started);
    figures.at_start = started.answered(&before).into_iter().map(|(kind, count)| (kind, count / run.objects())).collect();
    figures.memory.push(("started", started.memory));

    let updated = run.updates(&controller, &mut figures).await?;
    run.pods(&controller, example, &updated, &mut figures).await?;
    run.rest(&controller, &mut figures).await?;

    say("restarting the controller");
    controller.stop().await?;
    let controller = Controller::start(&run.plane, ports, arguments.program.as_deref(), 2)?;
    let took = run.whole(&controller, "Ready").await?;
    sleep(SETTLE).await;
    figures.restart = run.beginning(took, &controller.read(&run.plane).await?);
    controller.stop().await?;
    Ok(figures)
}

fn start_agents(places: Vec<Place>, arrive: Duration, controller: &str, ca_pem: &Arc<str>, cancel: &CancellationToken) -> Vec<Group> {
    let mut groups: BTreeMap<usize, Vec<Arc<Agent>>> = BTreeMap::new();
    let (begun, count) = (Instant::now(), places.len() as f64);
    for (number, place) in places.into_iter().enumerate() {
        let agent = Agent::new(&place);
        groups.entry(place.object).or_default().push(agent.clone());
        let (controller, ca_pem, cancel) = (controller.to_owned(), ca_pem.clone(), cancel.clone());
        let at = begun + arrive.mul_f64(number as f64 / count);
        tokio::spawn(async move {
            sleep_until(at).await;
            let pod = place.pod.clone();
            if let Err(error) = agent.run(place, controller, ca_pem, cancel.clone()).await
                && !cancel.is_cancelled()
            {
                say(&format!("the agent of {pod} ended: {error}"));
            }
        });
    }
    groups.into_values().map(Group).collect()
}

impl Run<'_> {
    fn objects(&self) -> f64 {
        self.extent.objects as f64
    }

    /// Waits until all replicas are ready in a committed group and every status says that `condition` holds; the seconds since the start.
    async fn whole(&self, controller: &Controller, condition: &str) -> Result<f64> {
        let replicas = self.objects() * self.extent.rollouts as f64;
        let mut reported = Instant::now();
        loop {
            let metrics = controller.metrics().await.unwrap_or_default();
            let ready = metrics.sum("weightsync_replicas", |labels| labels.get("state").is_some_and(|state| state == "ready"));
            let holding = self.statuses.holding(condition);
            if ready >= replicas && holding == self.extent.objects {
                return Ok(controller.started.elapsed().as_secs_f64());
            }
            let seen = format!("{ready} of {replicas} replicas are ready, {holding} objects are {condition}");
            ensure!(controller.started.elapsed() < LONG, "{seen}");
            if reported.elapsed() > Duration::from_secs(5) {
                reported = Instant::now();
                say(&seen);
            }
            // The page counts all members again each time it is asked for.
            sleep(Duration::from_millis(250).max(Duration::from_millis(4) * u32::try_from(self.extent.objects)?)).await;
        }
    }

    fn beginning(&self, took: f64, started: &Reading) -> Row {
        let nothing = Reading::default();
        vec![
            ("seconds", took),
            ("calls", started.calls(&nothing) / self.objects()),
            ("cpu seconds", started.cpu),
            ("looks", started.metrics.all("weightsync_reconcile_total") / self.objects()),
            ("look p50", started.reconcile(&nothing, 0.5)),
            ("look p99", started.reconcile(&nothing, 0.99)),
            ("events lost", started.metrics.all("weightsync_events_lost_total")),
        ]
    }

    /// Every object publishes one version a period, each at its own moment.
    async fn updates(&self, controller: &Controller, figures: &mut Figures) -> Result<Reading> {
        let first = controller.read(&self.plane).await?;
        let mut lags = Vec::new();
        for version in 1..=self.arguments.rounds {
            say(&format!("version {version}"));
            lags.extend(self.round(version).await?);
            figures.memory.push((["1 update", "2 updates", "3 updates"].get(usize::try_from(version)? - 1).copied().unwrap_or("more"), {
                sleep(SETTLE).await;
                controller.read(&self.plane).await?.memory
            }));
        }
        let last = controller.read(&self.plane).await?;
        let count = self.objects() * self.arguments.rounds as f64;
        lags.sort_by(f64::total_cmp);
        figures.updates = vec![
            ("calls", last.calls(&first) / count),
            ("looks", last.grown(&first, "weightsync_reconcile_total") / count),
            ("look p50", last.reconcile(&first, 0.5)),
            ("look p99", last.reconcile(&first, 0.99)),
            ("cpu ms", (last.cpu - first.cpu) * 1000.0 / count),
            ("reported p50", median(&lags)),
            ("reported max", lags.last().copied().unwrap_or(f64::NAN)),
            ("events lost", last.grown(&first, "weightsync_events_lost_total")),
        ];
        figures.answered = last.answered(&first).into_iter().map(|(kind, requests)| (kind, requests / count)).collect();
        Ok(last)
    }

    /// One version of every object; how many ms after its end each status reported that.
    async fn round(&self, version: u64) -> Result<Vec<f64>> {
        let period = Duration::from_secs(self.arguments.period);
        let transfer = Duration::from_millis(self.arguments.transfer_ms);
        let begun = Instant::now();
        let publishes = self.groups.iter().enumerate().map(|(number, group)| async move {
            sleep_until(begun + period.mul_f64(number as f64 / self.objects())).await;
            group.publish(version, transfer).await
        });
        let count = self.groups.len();
        let ends: Vec<Instant> = futures::future::try_join_all(publishes).await?;
        let until = Instant::now() + LONG;
        while self.statuses.holding("Ready") < count
            || self.statuses.holding("Progressing") > 0
            || (0..count).any(|object| self.statuses.reported(&object_name(object), version).is_none())
        {
            ensure!(Instant::now() < until, "version {version} is not in every status");
            sleep(Duration::from_millis(100)).await;
        }
        let lag = |(object, end): (usize, Instant)| {
            let reported = self.statuses.reported(&object_name(object), version).unwrap_or(end);
            reported.saturating_duration_since(end).as_secs_f64() * 1000.0
        };
        Ok(ends.into_iter().enumerate().map(lag).collect())
    }

    /// Changes of single pods: how many objects are looked at for each.
    async fn pods(&self, controller: &Controller, trainers: Vec<(String, String)>, before: &Reading, figures: &mut Figures) -> Result<()> {
        say("changing pods");
        let changes = trainers.iter().cycle().take(CHANGES).enumerate().map(|(number, (namespace, name))| {
            let pods: Api<Pod> = Api::namespaced(self.plane.client.clone(), namespace);
            let patch = Patch::Merge(json!({"metadata": {"annotations": {"changed": number.to_string()}}}));
            async move { pods.patch(name, &PatchParams::default(), &patch).await }
        });
        futures::stream::iter(changes).buffered(1).try_collect::<Vec<_>>().await?;
        sleep(SETTLE).await;
        let after = controller.read(&self.plane).await?;
        figures.pods = vec![
            ("looks a change", after.grown(before, "weightsync_reconcile_total") / CHANGES as f64),
            ("calls a change", after.calls(before) / CHANGES as f64),
            ("look p50", after.reconcile(before, 0.5)),
            ("look p99", after.reconcile(before, 0.99)),
            ("cpu ms a change", (after.cpu - before.cpu) * 1000.0 / CHANGES as f64),
        ];
        Ok(())
    }

    /// Nothing is published and nothing changes.
    async fn rest(&self, controller: &Controller, figures: &mut Figures) -> Result<()> {
        say(&format!("{} s at rest", self.arguments.idle));
        let before = controller.read(&self.plane).await?;
        sleep(Duration::from_secs(self.arguments.idle)).await;
        let after = controller.read(&self.plane).await?;
        let hours = after.seconds(&before) / 3600.0;
        figures.idle = vec![
            ("calls", after.calls(&before) / hours),
            ("with lease", after.all_calls(&before) / hours),
            ("looks an object", after.grown(&before, "weightsync_reconcile_total") / hours / self.objects()),
            ("look p50", after.reconcile(&before, 0.5)),
            ("look p99", after.reconcile(&before, 0.99)),
            ("cores", (after.cpu - before.cpu) / after.seconds(&before)),
            ("open files", after.metrics.all("weightsync_process_open_files")),
        ];
        figures.memory.extend([("at rest", after.memory), ("peak", after.peak)]);
        Ok(())
    }
}
