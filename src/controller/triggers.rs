//! The queue of objects to reconcile. A set, so that many pod events cost one reconcile for each object and no memory.

use std::collections::HashSet;
use std::sync::Arc;

use futures::Stream;
use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::object::Object;

/// Objects to reconcile. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Triggers(Arc<Inner>);

#[derive(Default)]
struct Inner {
    waiting: Mutex<HashSet<ObjectRef<Object>>>,
    more: Notify,
}

impl Triggers {
    pub(super) fn push(&self, object: ObjectRef<Object>) {
        self.0.waiting.lock().insert(object);
        self.0.more.notify_one();
    }

    fn take(&self) -> Option<ObjectRef<Object>> {
        let mut waiting = self.0.waiting.lock();
        let next = waiting.iter().next().cloned()?;
        waiting.take(&next)
    }

    pub(super) fn stream(self) -> impl Stream<Item = Result<ObjectRef<Object>, std::convert::Infallible>> + Send {
        futures::stream::unfold(self, |triggers| async move {
            loop {
                if let Some(next) = triggers.take() {
                    return Some((Ok(next), triggers));
                }
                triggers.0.more.notified().await;
            }
        })
    }
}
