//! The operator: watches `WeightSync` objects and pods, decides the desired state of each object, passes it to the object's coordinator,
//! and reports.
//!
//! One file a step, and pure where it decides:
//!
//! 1. *observe*: `stores` watches objects and pods, namespace by namespace.
//! 2. *decide*: `decide` turns an object and its pods into the coordinator's desired state; `ephemeral` and `readiness` decide what pods
//!    need.
//! 3. *apply*: `objects` owns one coordinator an object; `epoch_store` writes the epoch by compare-and-swap; `pods` patches pods.
//! 4. *report*: `report` makes the status, `hold` decides which changes may wait, `events` publishes Events.
//!
//! `webhook` injects the agent into new pods, on clusters whose policies cannot.
//!
//! Only the holder of the lease acts; a controller that lost it ends. Every call has a deadline, every write to a pod its UID. Updates do
//! not pass through here: they continue while the controller is away.

mod authority;
mod calls;
mod census;
mod counted;
mod decide;
mod ephemeral;
mod epoch_store;
mod events;
mod failures;
mod hold;
mod launch;
mod lease;
mod metrics;
mod object;
mod objects;
mod pods;
mod readiness;
mod reconcile;
mod report;
mod run;
mod stores;
#[cfg(test)]
mod tests;
mod token_review;
mod traces;
mod triggers;
mod ui;
mod webhook;
mod wedged;

pub use events::REPORTER;
pub use metrics::DEFINITIONS as METRICS;
pub use run::{Settings, run};
pub use ui::Ui;
pub use webhook::{Injection, WebhookSettings};
