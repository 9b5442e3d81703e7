//! Carries out the epochs of one object: the thin, asynchronous side of `membership`.
//!
//! [`Coordinator`] owns the membership of one object, listens to its agents, and acts on membership's decisions. Each call has a deadline,
//! and all members of a step are called at once. [`Enrollment`] gives agents their certificates and accepts their announcements. This crate
//! never decides which members are in a group, and holds no lock while it awaits anything.

mod addresses;
mod attachment;
mod calls;
mod clock;
mod common_change;
mod directory;
mod enrollment;
pub mod local;
pub mod page;
mod ports;
mod run;
mod statements;
#[cfg(test)]
pub(crate) mod tests;
mod timing;
mod tokens;

pub use addresses::Addresses;
pub use directory::{Directory, Held, Registered};
pub use enrollment::{Enrollment, Presented, ProvenPod, TokenVerifier, keep_certified, router};
pub use ports::{CoordinatorEvent, EpochStore, EventSink, PersistError};
pub use run::{Context, Coordinator, CoordinatorHandle, Ended, Wanted};
pub use timing::Timing;
pub use tokens::SingleUseTokens;
