//! The part of a rollout in updates, without an engine: it opens each one, takes the bytes, and says that it verified and installed them.
//!
//! Answers at once and checks nothing. What it says instead while it lies is decided here too.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::watch;
use weightsync_core::protocol::{
    AbortRequest, ActivateRequest, BeginRequest, Call, FinishRequest, HeldVersion, InstallStep, MemberState, Refusal, RefusalCode,
    StatusRequest, UpdateId, UpdateStatus,
};
use weightsync_net::https::{Answered, Valid};

use super::{Lie, say};
use crate::fake_agent::FakeAgent;

/// What it does in updates.
#[derive(Clone)]
pub(super) struct Part {
    status: watch::Sender<Option<UpdateStatus>>,
    /// What it says that its engine confirmed.
    installed: watch::Sender<Option<HeldVersion>>,
    /// The manifest of the update that is open.
    manifest: Arc<Mutex<Option<String>>>,
    lie: Arc<Mutex<Option<Lie>>>,
}

impl Part {
    /// Also the routes by which leaders reach it.
    pub(super) fn new() -> (Self, Router) {
        let part =
            Self { status: watch::Sender::new(None), installed: watch::Sender::new(None), manifest: Arc::default(), lie: Arc::default() };
        let routes = Router::new()
            .route(BeginRequest::PATH, post(begin))
            .route(FinishRequest::PATH, post(finish))
            .route(ActivateRequest::PATH, post(activate))
            .route(AbortRequest::PATH, post(abort))
            .route(StatusRequest::PATH, get(status))
            .with_state(part.clone());
        (part, routes)
    }

    /// Begins or ends to lie.
    pub(super) fn lie(&self, lie: Lie, now: bool) {
        *self.lie.lock() = now.then_some(lie);
    }

    /// Has the agent say what it installed, for ever.
    pub(super) async fn follow(&self, agent: &FakeAgent) {
        let mut installed = self.installed.subscribe();
        while installed.changed().await.is_ok() {
            let held = installed.borrow_and_update().clone();
            agent.change(|state: &mut MemberState| {
                state.installed.clone_from(&held);
                state.retained = held;
            });
        }
    }

    /// Whether it sends this lie now.
    pub(super) fn tells(&self, lie: Lie) -> bool {
        *self.lie.lock() == Some(lie)
    }

    fn lies(&self, lie: Lie) -> bool {
        let lies = self.tells(lie);
        if lies {
            say(lie.name(), &json!("sent"));
        }
        lies
    }

    fn at(&self, update: UpdateId, step: InstallStep, bytes: u64) -> UpdateStatus {
        let sequence = self.status.borrow().as_ref().map_or(1, |status| status.sequence + 1);
        let status = UpdateStatus {
            update,
            sequence,
            step,
            bytes,
            reason: None,
            dirty: false,
            refused: false,
            repeats: false,
            fenced: false,
            steps_ms: Vec::new(),
            checksum: None,
            mixed: Vec::new(),
            notes: Vec::new(),
        };
        self.status.send_replace(Some(status.clone()));
        status
    }

    /// So many bytes of the open update are here.
    pub(super) fn received(&self, update: &UpdateId, bytes: u64) {
        self.status.send_modify(|status| {
            if let Some(status) = status.as_mut().filter(|status| status.update == *update) {
                (status.bytes, status.sequence) = (status.bytes + bytes, status.sequence + 1);
            }
        });
    }

    fn installs(&self, version: u64) {
        if let Some(manifest) = self.manifest.lock().clone() {
            self.installed.send_replace(Some(HeldVersion { version, manifest }));
        }
    }
}

async fn begin(State(part): State<Part>, Valid(request): Valid<BeginRequest>) -> Answered<BeginRequest> {
    if part.lies(Lie::Layout) {
        return Err(Refusal { code: RefusalCode::LayoutMismatch, message: "a lie".into() }.into());
    }
    part.manifest.lock().clone_from(&request.manifest_digest);
    if part.lies(Lie::Progress) {
        return Ok(Json(part.at(request.update, InstallStep::Installed, request.layout.total_bytes)));
    }
    Ok(Json(part.at(request.update, InstallStep::Receiving, 0)))
}

async fn finish(State(part): State<Part>, Valid(request): Valid<FinishRequest>) -> Json<UpdateStatus> {
    *part.manifest.lock() = Some(request.manifest_digest);
    let bytes = part.status.borrow().as_ref().map_or(0, |status| status.bytes);
    Json(part.at(request.update, InstallStep::Delivered, bytes))
}

async fn activate(State(part): State<Part>, Valid(request): Valid<ActivateRequest>) -> Json<UpdateStatus> {
    part.installs(request.update.version);
    let bytes = part.status.borrow().as_ref().map_or(0, |status| status.bytes);
    Json(part.at(request.update, InstallStep::Installed, bytes))
}

async fn abort(State(part): State<Part>, Valid(request): Valid<AbortRequest>) -> Json<Option<UpdateStatus>> {
    let open = part.status.borrow().clone().filter(|status| status.update == request.update && !status.step.is_final());
    Json(open.map(|status| part.at(status.update, InstallStep::Failed, status.bytes)))
}

async fn status(State(part): State<Part>, Query(StatusRequest { after }): Query<StatusRequest>) -> Answered<StatusRequest> {
    let mut changes = part.status.subscribe();
    let changed = changes.wait_for(|status| status.as_ref().is_some_and(|status| after != Some(status.sequence)));
    // Unchanged parts are sent unchanged.
    let _ = tokio::time::timeout(StatusRequest::LONG_POLL, changed).await;
    let status = part.status.borrow().clone();
    status.map(Json).ok_or_else(|| Refusal { code: RefusalCode::WrongPhase, message: "no update was open here".into() }.into())
}
