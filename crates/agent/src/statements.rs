//! What sources signed about the versions that this agent holds.
//!
//! A source signs here what it announces; a rollout keeps what was signed, once it was checked, and presents it with its state and to whom it
//! feeds. It decides which statements are kept, never which version counts.

use std::sync::{Mutex, OnceLock};

use super::group::refusal;
use super::locks::lock;
use weightsync_core::protocol::{HeldVersion, Refusal, RefusalCode, STATEMENTS, Statement};
use weightsync_net::identity::{Identity, PeerIdentity};

/// Statements, and the identity that signs and checks them.
#[derive(Default)]
pub struct Statements {
    identity: OnceLock<Identity>,
    /// The last used is last.
    kept: Mutex<Vec<Statement>>,
}

impl Statements {
    /// Signs and checks with this identity. Once, before the first epoch.
    pub fn with_identity(&self, identity: &Identity) {
        let _ = self.identity.set(identity.clone());
    }

    /// A source announces a version: what it signed about it, now or before. None when it cannot sign: the version does not count then.
    pub fn announce(&self, held: &HeldVersion, layout: &str, epoch: u64) -> Option<Statement> {
        let known = self.about(held);
        if known.is_some() {
            return known;
        }
        match self.identity.get()?.state(held, layout, epoch) {
            Ok(statement) => {
                self.keep(statement.clone());
                Some(statement)
            }
            Err(error) => {
                tracing::error!(version = held.version, %error, "the version cannot be announced: it will not count");
                None
            }
        }
    }

    /// Keeps a statement about exactly this version once it was checked.
    pub fn learn(&self, statement: &Statement, held: &HeldVersion, layout: &str) -> Result<(), Refusal> {
        let forbidden = |what: String| {
            let version = held.version;
            tracing::warn!(version, what, "a statement about a version was refused");
            refusal(RefusalCode::Forbidden, format!("the statement about version {version} proves nothing: {what}"))
        };
        if statement.held != *held || statement.layout != layout {
            return Err(forbidden("it is about another version".into()));
        }
        if self.about(held).is_some_and(|known| known.epoch >= statement.epoch) {
            return Ok(());
        }
        let Some((identity, PeerIdentity::Agent { weightsync, .. })) = self.identity.get().and_then(|own| Some((own, own.own()?))) else {
            return Err(forbidden("this agent has no certificate to check it by".into()));
        };
        identity.check(statement, &weightsync).map_err(|error| forbidden(error.to_string()))?;
        self.keep(statement.clone());
        Ok(())
    }

    /// What was signed about a version.
    pub fn about(&self, held: &HeldVersion) -> Option<Statement> {
        lock(&self.kept).iter().find(|statement| statement.held == *held).cloned()
    }

    fn keep(&self, statement: Statement) {
        let mut kept = lock(&self.kept);
        kept.retain(|known| known.held != statement.held);
        if kept.len() >= STATEMENTS {
            kept.remove(0);
        }
        kept.push(statement);
    }
}
