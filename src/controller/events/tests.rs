use serde_json::{Value, json};
use weightsync_coordinator::page::RecentEvents;
use weightsync_core::protocol::{MemberName, Reason};
use weightsync_net::metrics::Metrics;

use super::super::tests::api_server::ApiServer;
use super::*;

fn lost(number: usize) -> Reported {
    let event = CoordinatorEvent { reason: Reason::AgentLost, message: number.to_string(), member: None, warning: true };
    Reported { regarding: ObjectReference::default(), related: None, event }
}

#[tokio::test]
async fn full_queue_drops_the_oldest_event_and_keeps_the_newest() {
    let queue = Arc::<Queue>::default();
    let dropped = (0..QUEUE + 3).filter(|number| !queue.push(lost(*number))).count();
    assert_eq!(dropped, 3);
    drop(Open(queue.clone()));
    let mut kept = Vec::new();
    while let Some(reported) = queue.next().await {
        kept.push(reported.event.message);
    }
    assert_eq!((kept.len(), kept.first().unwrap().as_str()), (QUEUE, "3"));
    assert_eq!(kept.last().unwrap(), &(QUEUE + 2).to_string());
}

#[tokio::test]
async fn second_cause_of_a_reason_is_an_event_of_its_own() {
    let api = ApiServer::new();
    let events = Events::start(api.client(), "controller-0".into(), ControllerMetrics::new(&Metrics::default()));
    let object = ObjectReference { namespace: Some("team".into()), name: Some("run".into()), ..ObjectReference::default() };
    let sender = events.of(object, RecentEvents::default());
    for (number, cause) in ["no answer", "exit status: 1", "no answer"].into_iter().enumerate() {
        let member = Some(MemberName("actors/sim-1".into()));
        sender.publish(CoordinatorEvent { reason: Reason::EngineUnhealthy, message: cause.into(), member, warning: true });
        // Each before the next one: they are published side by side.
        let calls = || api.calls("create", "events") + api.calls("patch", "events");
        tokio::time::timeout(DEADLINE, async {
            while calls() <= number {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
    }
    let mut seen: Vec<(Value, Value)> =
        api.all("events").iter().map(|event| (event["note"].clone(), event["series"]["count"].clone())).collect();
    seen.sort_by_key(|(note, _)| note.to_string());
    assert_eq!(seen, [(json!("actors/sim-1: exit status: 1"), json!(null)), (json!("actors/sim-1: no answer"), json!(2))]);
}
