//! The web page of a group on one host, on the loopback interface. Decides nothing: it shows what membership decided.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;

use crate::page::{Audience, History, Page, PageCondition, PageObject, RecentEvents, record};
use weightsync_core::membership::MembershipView;
use weightsync_net::https::{Limits, serve_plain};

/// A page that is served. Dropping it ends the server.
pub struct PageServer {
    /// Its address, for a browser.
    pub url: String,
    _stop: DropGuard,
    _record: AbortOnDropHandle<()>,
}

impl PageServer {
    pub(super) async fn start(
        address: SocketAddr,
        name: &str,
        view: watch::Receiver<MembershipView>,
        recent: RecentEvents,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let url = format!("http://{}/ui/", listener.local_addr()?);
        let history = Arc::<Mutex<History>>::default();
        let record = record(view.clone(), history.clone(), |_| ());
        let name = name.to_owned();
        let objects = move || {
            let view = view.borrow().clone();
            let (updates, events) = (history.lock().latest(), recent.latest());
            Some(vec![PageObject {
                namespace: "local".to_owned(),
                name: name.clone(),
                suspended: false,
                conditions: conditions(&view),
                view,
                updates,
                events,
            }])
        };
        let page = Page { audience: Audience::Loopback, server: "this host".into(), objects: Arc::new(objects) };
        let stop = CancellationToken::new();
        tokio::spawn(serve_plain(listener, page.router(), Limits::pages(), stop.clone()));
        Ok(Self { url, _stop: stop.drop_guard(), _record: AbortOnDropHandle::new(tokio::spawn(record)) })
    }
}

/// `Degraded` for each problem: a group of one host has no object with conditions.
fn conditions(view: &MembershipView) -> Vec<PageCondition> {
    let problem = |degradation: &weightsync_core::membership::Degradation| PageCondition {
        r#type: "Degraded".to_owned(),
        status: "True".to_owned(),
        reason: degradation.reason.to_string(),
        message: degradation.message.clone(),
    };
    view.degraded.iter().map(problem).collect()
}
