//! Counts and times every request of a client, because kube does not. This includes watches, leases and Events, which a wrapper around
//! single calls would miss. It changes neither request nor response.

use http::{Method as Verb, Request};
use kube::Client;
use kube::client::Body;
use tokio::time::Instant;

use super::metrics::{Answered, ControllerMetrics, Method};

pub(super) fn counted(client: Client, metrics: &ControllerMetrics) -> Client {
    let namespace = client.default_namespace().to_owned();
    let metrics = metrics.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, pending) = (client.clone(), Pending::new(&request, &metrics));
        async move {
            let outcome = client.send(request).await;
            pending.answered(outcome.as_ref().map_or_else(|_| "error".to_owned(), |answer| answer.status().as_u16().to_string()));
            outcome
        }
    });
    Client::new(service, namespace)
}

/// A running request. If it is dropped without a response, its caller gave up.
struct Pending {
    metrics: ControllerMetrics,
    method: &'static str,
    begun: Instant,
    code: Option<String>,
}

impl Pending {
    fn new(request: &Request<Body>, metrics: &ControllerMetrics) -> Self {
        Self { metrics: metrics.clone(), method: word(request), begun: Instant::now(), code: None }
    }

    fn answered(mut self, code: String) {
        self.code = Some(code);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let code = self.code.take().unwrap_or_else(|| "timeout".to_owned());
        self.metrics.requests.get_or_create(&Answered { method: self.method, code }).inc();
        self.metrics.request_duration.get_or_create(&Method { method: self.method }).observe(self.begun.elapsed().as_secs_f64());
    }
}

fn word(request: &Request<Body>) -> &'static str {
    let watches = request.uri().query().is_some_and(|query| query.split('&').any(|pair| pair == "watch=true"));
    match *request.method() {
        Verb::GET if watches => "watch",
        Verb::GET => "get",
        Verb::POST => "post",
        Verb::PUT => "put",
        Verb::PATCH => "patch",
        _ => "delete",
    }
}
