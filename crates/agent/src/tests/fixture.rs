//! A group of agents, each on a runtime of its own so that it can be killed as a process is, and a tiny coordinator that forms epochs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::ServerName;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::corrupting::{Corrupting, Wrong};
use super::engine::TestEngine;
use crate::attempts::Attempts;
use crate::client::PublishQueue;
use crate::core::{Core, Facts};
use crate::group::{Me, Standing};
use crate::lead::Leader;
use crate::lead::feed::Feeder;
use crate::rollout::readiness::Assigned;
use crate::rollout::{Places, Rollout};
use crate::roster;
use crate::server::{Endpoint, Part, router};
use crate::source::Source;
use crate::space::Cgroups;
use weightsync_core::protocol::*;
use weightsync_core::weights::IgnoredTensors;
use weightsync_engine::Engine;
use weightsync_net::https::{Access, AgentClient, CallError, Limits, serve_https};
use weightsync_net::identity::{Ca, ClientCertificates, Identity, PeerIdentity, agent_name};
use weightsync_transport::Transport;
use weightsync_transport::tcp::{DataTls, TcpOptions, TcpTransport};

pub const WEIGHTSYNC: &str = "object";
pub const HOUR: Duration = Duration::from_secs(3600);
pub const SOON: Duration = Duration::from_secs(20);

/// One agent on a runtime of its own.
pub struct Member {
    pub name: MemberName,
    pub core: Arc<Core>,
    pub leader: Arc<Leader>,
    pub part: Part,
    pub queue: Arc<PublishQueue>,
    pub engine: TestEngine,
    pub roster: tokio::sync::watch::Receiver<RosterView>,
    pub address: MemberAddress,
    pub role: Role,
    cancel: CancellationToken,
    runtime: Option<Runtime>,
}

impl Member {
    /// Ends it as SIGKILL does: every socket closes, nothing is tidied up.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub fn rollout(&self) -> &Arc<Rollout> {
        match &self.part {
            Part::Rollout(rollout) => rollout,
            Part::Source(_) => panic!("{} is a source", self.name),
        }
    }

    pub fn state(&self) -> MemberState {
        MemberState::clone(&self.core.events().state())
    }

    /// Waits until its state is as wanted.
    pub async fn until(&self, what: &str, wanted: impl Fn(&MemberState) -> bool) -> MemberState {
        let mut states = self.core.events().states();
        let waited = tokio::time::timeout(SOON, states.wait_for(|state| wanted(state))).await;
        let Ok(state) = waited else { panic!("{}: never {what}: {:#?}", self.name, self.state()) };
        MemberState::clone(&state.unwrap())
    }

    pub async fn until_installed(&self, version: Version) -> MemberState {
        self.until(&format!("at version {version}"), |state| {
            state.installed.as_ref().is_some_and(|held| held.version == version) && state.phase == MemberPhase::Ready
        })
        .await
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.cancel.cancel();
        self.kill();
    }
}

/// Everything that a group needs.
pub struct Fixture {
    pub ca: Ca,
    pub client: AgentClient,
    pub versions: tempfile::TempDir,
    pub policy: UpdatePolicy,
    pub epoch: u64,
    pub current: Option<HeldVersion>,
    pub returned: Option<Returned>,
    pub refused: Vec<Version>,
    pub wrong: Arc<Wrong>,
    /// Of rollouts.
    pub cgroups: Cgroups,
    pub pods: u32,
}

impl Fixture {
    pub fn new() -> Self {
        let ca = Ca::generate().unwrap();
        let client = AgentClient::new(ca.issue(&PeerIdentity::Controller, HOUR).unwrap());
        let health = HealthPolicy { period_ms: 50, timeout_ms: 1_000, failure_threshold: 2, success_threshold: 1 };
        let policy = UpdatePolicy {
            pause: PausePolicy::Keep,
            kv_cache: KvCachePolicy::Reset,
            min_ready: 1,
            silence_ms: 3_000,
            update_timeout_ms: 15_000,
            retain_bytes: 64 << 20,
            keep: 1,
            max_unavailable: 0,
            max_skew: None,
            bucket_bytes: 0,
            delivery: weightsync_core::protocol::Delivery::default(),
            digest: weightsync_core::protocol::Digest::Blake3,
            data_tls: true,
            // Rates on a busy machine would change the order of chains.
            transport: TransportPolicy { preflight: Preflight::Off, ..TransportPolicy::default() },
            health,
            canary: None,
        };
        let (versions, cgroups) = (tempfile::tempdir().unwrap(), unlimited());
        Self {
            ca,
            client,
            versions,
            policy,
            epoch: 0,
            current: None,
            returned: None,
            refused: Vec::new(),
            wrong: Arc::default(),
            cgroups,
            pods: 0,
        }
    }

    pub fn source(&mut self) -> Member {
        self.member("trainer/t-0", Role::Source, TestEngine::default())
    }

    pub fn rollout(&mut self, name: &str) -> Member {
        self.member(name, Role::Rollout, TestEngine::default())
    }

    pub fn rollouts(&mut self, count: usize) -> Vec<Member> {
        (0..count).map(|number| self.rollout(&format!("actors/r-{number}"))).collect()
    }

    pub fn member(&mut self, name: &str, role: Role, engine: TestEngine) -> Member {
        self.pods += 1;
        let pod_uid = format!("pod-{}", self.pods);
        self.pod(name, role, engine, &pod_uid)
    }

    /// An agent in that pod.
    pub fn pod(&mut self, name: &str, role: Role, engine: TestEngine, pod_uid: &str) -> Member {
        let identity = self.ca.issue(&PeerIdentity::Agent { weightsync: WEIGHTSYNC.into(), pod_uid: pod_uid.into(), role }, HOUR).unwrap();
        let incarnation = Incarnation { pod_uid: pod_uid.into(), instance: uuid::Uuid::new_v4().to_string() };
        let name = MemberName(name.into());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let place = self.versions.path().to_owned();
        let wrong = (role == Role::Source).then(|| self.wrong.clone());
        let (start, cancel) =
            (Start { identity, incarnation, role, engine, place, wrong, cgroups: self.cgroups.clone() }, CancellationToken::new());
        let (name_of, token) = (name.clone(), cancel.clone());
        let (reported, hear) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            reported.send(start.run(name_of, token).await).unwrap();
        });
        let mut member = hear.recv_timeout(SOON).unwrap();
        member.runtime = Some(runtime);
        member
    }

    fn roster(members: &[&Member]) -> Roster {
        let mut offset = 0;
        let rows = members
            .iter()
            .map(|member| {
                offset += 1;
                RosterMember {
                    name: member.name.clone(),
                    role: member.role,
                    rank_offset: offset - 1,
                    size: 1,
                    pods: vec![PodRef {
                        name: member.name.0.clone(),
                        uid: member.address.incarnation.pod_uid.clone(),
                        node: None,
                        ips: Vec::new(),
                    }],
                    port: None,
                }
            })
            .collect();
        let chain = members.iter().filter(|member| member.role == Role::Rollout).map(|member| member.name.clone()).collect();
        Roster { members: rows, world_size: offset, chain }
    }

    pub fn id(&self) -> EpochId {
        EpochId { weightsync: WEIGHTSYNC.into(), created: 1, term: 0, epoch: self.epoch }
    }

    pub async fn ask<C: Call>(&self, to: &Member, request: &C) -> Result<C::Answer, CallError> {
        self.client.ask(&to.address.control, &to.address.incarnation.pod_uid, request, SOON).await
    }

    /// A message of one member to another.
    pub async fn ask_as<C: Call>(&self, from: &Member, to: &Member, request: &C) -> Result<C::Answer, CallError> {
        let client = AgentClient::new(self.identity(from));
        client.ask(&to.address.control, &to.address.incarnation.pod_uid, request, SOON).await
    }

    /// A certificate as that member has it.
    pub fn identity(&self, of: &Member) -> Identity {
        let peer = PeerIdentity::Agent { weightsync: WEIGHTSYNC.into(), pod_uid: of.address.incarnation.pod_uid.clone(), role: of.role };
        self.ca.issue(&peer, HOUR).unwrap()
    }

    /// Forms the next epoch of these members: prepares all, commits rollouts, then the feeder, then the source.
    pub async fn form(&mut self, members: &[&Member], feeder: Option<&Member>) -> EpochId {
        self.epoch += 1;
        let id = self.id();
        let roster = Self::roster(members);
        let prepare = |member: &&Member| PrepareRequest {
            id: id.clone(),
            member: member.name.clone(),
            roster: roster.clone(),
            policy: self.policy.clone(),
            why: "because of the test".to_owned(),
            deadline_ms: 5_000,
        };
        for member in members {
            self.ask(member, &prepare(member)).await.unwrap();
        }
        let request = self.commit_request(members, feeder);
        let mut order: Vec<&&Member> = members.iter().collect();
        order.sort_by_key(|member| (member.role == Role::Source, feeder.is_some_and(|feeder| feeder.name == member.name)));
        for member in order {
            self.ask(member, &request).await.unwrap();
        }
        id
    }

    pub fn prepare_request(&self, members: &[&Member], member: &Member) -> PrepareRequest {
        PrepareRequest {
            id: self.id(),
            member: member.name.clone(),
            roster: Self::roster(members),
            policy: self.policy.clone(),
            why: "because of the test".to_owned(),
            deadline_ms: 5_000,
        }
    }

    pub fn commit_request(&self, members: &[&Member], feeder: Option<&Member>) -> CommitRequest {
        CommitRequest {
            id: self.id(),
            addresses: members.iter().map(|member| member.address.clone()).collect(),
            current: self.current.clone(),
            returned: self.returned,
            refused: self.refused.clone(),
            feeder: feeder.map(|feeder| feeder.name.clone()),
            transport: TransportChoice::default(),
            secret: format!("secret of {}", self.epoch),
            deadline_ms: 10_000,
        }
    }

    pub async fn fence(&self, members: &[&Member]) {
        let request = FenceRequest { id: self.id(), reason: "a member was lost".into() };
        for member in members {
            let _ = self.ask(member, &request).await;
        }
    }
}

struct Start {
    identity: Identity,
    incarnation: Incarnation,
    role: Role,
    engine: TestEngine,
    place: PathBuf,
    wrong: Option<Arc<Wrong>>,
    cgroups: Cgroups,
}

impl Start {
    async fn run(self, name: MemberName, cancel: CancellationToken) -> Member {
        let core = Core::new(Me { incarnation: self.incarnation.clone(), role: self.role, port: None }, Facts::default());
        let control = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tls = data_tls(&self.identity, &core);
        let options = TcpOptions { tls: Some(tls), ..TcpOptions::default() };
        let tcp = TcpTransport::bind("127.0.0.1:0".parse().unwrap(), core.clone(), options).await.unwrap();
        let data = tcp.address();
        let transport: Arc<dyn Transport> = match self.wrong {
            Some(wrong) => Arc::new(Corrupting { inner: tcp, wrong }),
            None => Arc::new(tcp),
        };
        let leader = Leader::new(core.clone(), AgentClient::new(self.identity.clone()), transport);
        let queue: Arc<PublishQueue> = Arc::default();
        let (shown, roster) = tokio::sync::watch::channel(RosterView { epoch: None, version: None, replicas: Vec::new() });
        let part = match self.role {
            Role::Source => {
                let source = Source::new(leader.clone(), unlimited(), roster.clone());
                tokio::spawn(source.clone().run(queue.clone(), cancel.clone()));
                Part::Source(source)
            }
            Role::Rollout => {
                let places = Places { versions: self.place, versions_in_engine: None, model: None, name: self.incarnation.pod_uid.clone() };
                let engine: Arc<dyn Engine> = Arc::new(self.engine.clone());
                // A killed process lets its lock go at once; a killed runtime of this process ends its tasks a little later.
                let started = async {
                    loop {
                        match Rollout::start(core.clone(), engine.clone(), places.clone(), self.cgroups.clone()) {
                            Ok(rollout) => return rollout,
                            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                        }
                    }
                };
                let rollout = tokio::time::timeout(SOON, started).await.expect("its directory is free");
                rollout.assign(Assigned {
                    known: true,
                    serve_before_first_version: true,
                    suspended: false,
                    current: None,
                    returned: None,
                    newest: None,
                    ignored: IgnoredTensors::default(),
                });
                tokio::spawn(rollout.clone().supervise(cancel.clone()));
                let feeder = Feeder::new(leader.clone(), rollout.clone(), Arc::<Attempts>::default());
                tokio::spawn(async move { feeder.run().await });
                Part::Rollout(rollout)
            }
        };
        tokio::spawn(roster::keep(core.clone(), leader.clone(), shown, cancel.clone()));
        let address = MemberAddress {
            member: name.clone(),
            incarnation: self.incarnation,
            control: control.local_addr().unwrap().to_string(),
            data: data.clone(),
            engine_url: None,
        };
        let endpoint = Arc::new(Endpoint { core: core.clone(), leader: leader.clone(), part: part.clone(), data_address: data });
        let limits = Limits { drain: Duration::ZERO, ..Limits::default() };
        tokio::spawn(serve_https(control, self.identity, Access::Group, router(endpoint), limits, cancel.clone()));
        Member { name, core, leader, part, queue, engine: self.engine, roster, address, role: self.role, cancel, runtime: None }
    }
}

#[test]
fn no_two_times_of_the_fixture_are_equal() {
    let mut fixture = Fixture::new();
    let source = fixture.source();
    let UpdatePolicy { silence_ms, update_timeout_ms, health, .. } = fixture.policy;
    let (prepare, commit) =
        (fixture.prepare_request(&[&source], &source).deadline_ms, fixture.commit_request(&[&source], None).deadline_ms);
    let all = [silence_ms, update_timeout_ms, health.period_ms, health.timeout_ms, prepare, commit];
    assert_eq!(std::collections::BTreeSet::from(all).len(), all.len(), "{all:?}");
    assert_ne!(health.failure_threshold, health.success_threshold);
}

fn unlimited() -> Cgroups {
    Cgroups::at(PathBuf::from("/nonexistent"), String::new())
}

fn data_tls(identity: &Identity, core: &Arc<Core>) -> DataTls {
    let standing = core.standing();
    DataTls {
        server: identity.server_config(ClientCertificates::Required).unwrap(),
        client: Arc::new(identity.client_config().unwrap()),
        server_name: Arc::new(move |member| {
            let standing = standing.borrow();
            let (Standing::Committing(epoch) | Standing::Committed(epoch)) = &*standing else { return None };
            ServerName::try_from(agent_name(&epoch.address(member)?.incarnation.pod_uid)).ok()
        }),
    }
}
