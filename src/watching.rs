//! Watches of the API server, of the controller and of the command line: all are opened here.
//!
//! Decides after which failures a watch begins with a list again: when the server no longer has the version from which the watch would go on.
//! kube-runtime 5.0.0 lists again for an ERROR event of the stream only. A watch that cannot start keeps its version there, and is tried again
//! for ever, where the server or a proxy answers with HTTP 410. This never hides a failure from the controller's metrics.

use std::fmt::Debug;
use std::future::ready;

use futures::{Stream, StreamExt, stream};
use kube::core::Status;
use kube::runtime::watcher::{self, Config, Error, Event};
use kube::runtime::{WatchStreamExt, watcher as open};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

/// Events and failures; waits longer after each failure in a row.
pub fn watch<K>(api: Api<K>, config: Config) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let opened = move || open(api.clone(), config.clone()).boxed();
    let first = opened();
    let events = stream::unfold((opened, first), |(opened, mut events)| async move {
        let event = events.next().await?;
        if event.as_ref().is_err_and(is_expired) {
            events = opened();
        }
        Some((event, (opened, events)))
    });
    events.default_backoff()
}

/// The objects as they change, for commands that end with a failure; an expired version is none.
pub fn changes<K>(api: Api<K>, config: Config) -> impl Stream<Item = watcher::Result<K>> + Send
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    watch(api, config).filter(|event| ready(!event.as_ref().is_err_and(is_expired))).applied_objects()
}

/// Whether the server no longer has the version from which the watch would go on.
fn is_expired(error: &Error) -> bool {
    match error {
        // Any JSON of a proxy is read as a Status: without a code, where it has none.
        Error::WatchStartFailed(kube::Error::Api(status)) => says_so(status) || status.code == 0,
        Error::WatchFailed(kube::Error::Api(status)) | Error::WatchError(status) => says_so(status),
        Error::InitialListFailed(_) | Error::WatchStartFailed(_) | Error::WatchFailed(_) | Error::NoResourceVersion => false,
    }
}

fn says_so(status: &Status) -> bool {
    status.code == 410 || matches!(status.reason.as_str(), "Expired" | "Gone")
}
