use super::*;
use weightsync_core::protocol::Reason;

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
