//! One object's epochs carried out towards agents: the thin, asynchronous side of `membership`.
//!
//! [`Coordinator`] owns the membership of one object, listens to its agents, and does what membership decides, each call with a deadline
//! and all members of a step at once. [`Enrollment`] gives agents their certificates and takes their announcements. It never decides who
//! is in a group, and no lock is held while anything is awaited.

mod addresses;
mod attachment;
mod calls;
mod clock;
mod common_change;
mod directory;
mod enrollment;
pub mod local;
mod ports;
mod run;
mod statements;
#[cfg(test)]
pub(crate) mod tests;
mod tokens;

pub use addresses::Addresses;
pub use directory::{Directory, Held};
pub use enrollment::{Enrollment, Presented, ProvenPod, TokenVerifier, keep_certified, router};
pub use ports::{CoordinatorEvent, EpochStore, EventSink, PersistError};
pub use run::{Context, Coordinator, CoordinatorHandle, Ended, Timing, Wanted};
pub use tokens::SingleUseTokens;
