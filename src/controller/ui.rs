//! The web page of a controller: what it shows once this controller leads.

use std::sync::{Arc, OnceLock};

use axum::Router;

use super::objects::{Objects, Seen};
use crate::api::ConditionType;
use weightsync_coordinator::page::{Audience, Page, PageCondition, PageObject};

/// Clients that may see the web page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Ui {
    /// No client: the page is off.
    Off,
    /// Peers on the loopback interface, such as `kubectl port-forward`.
    #[default]
    Local,
    /// All clients of the status port: for use with an authenticating proxy.
    Open,
}

/// The objects of a controller, from the time at which it leads. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Led(Arc<OnceLock<Arc<Objects>>>);

impl Led {
    /// This controller leads: from now on it has data to show.
    pub(super) fn lead(&self, objects: &Arc<Objects>) {
        // A process leads at most once.
        let _ = self.0.set(objects.clone());
    }

    /// The routes of the page of that pod; none if the page is off.
    pub(super) fn router(&self, access: Ui, pod: &str) -> Router {
        let audience = match access {
            Ui::Off => return Router::new(),
            Ui::Local => Audience::Loopback,
            Ui::Open => Audience::All,
        };
        let led = self.0.clone();
        let objects = Arc::new(move || led.get().map(|objects| objects.seen().into_iter().map(shown).collect()));
        Page { audience, server: pod.into(), objects }.router()
    }
}

fn shown(seen: Seen) -> PageObject {
    let conditions = seen.status.map(|status| status.conditions).unwrap_or_default();
    let of_type = |kind: &ConditionType| {
        let condition = conditions.iter().find(|condition| condition.type_ == kind.as_str())?;
        Some(PageCondition {
            r#type: condition.type_.clone(),
            status: condition.status.clone(),
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        })
    };
    PageObject {
        namespace: seen.namespace,
        name: seen.name,
        suspended: seen.suspended,
        conditions: ConditionType::ALL.iter().filter_map(of_type).collect(),
        view: seen.view,
        updates: seen.history,
        events: seen.events,
    }
}
