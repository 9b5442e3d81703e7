//! Checks each statement that members present, once.
//!
//! Decides which statements are genuine: a source of this object signed them. Membership decides what follows.

use std::collections::HashSet;

use weightsync_core::protocol::{Announced, STATEMENTS, Statement};
use weightsync_net::identity::Identity;

/// Most genuine statements that are remembered. A statement that a thousand replicas present is checked once.
const REMEMBERED: usize = 1024;

/// Statements about one object.
pub(super) struct Statements {
    weightsync: String,
    genuine: HashSet<Statement>,
}

impl Statements {
    pub(super) fn new(weightsync: &str) -> Self {
        Self { weightsync: weightsync.to_owned(), genuine: HashSet::new() }
    }

    /// Returns what new statements prove.
    pub(super) fn check(&mut self, presented: Vec<Statement>, identity: &Identity) -> Vec<Announced> {
        let mut proven = Vec::new();
        for statement in presented.into_iter().take(STATEMENTS) {
            if self.genuine.contains(&statement) {
                continue;
            }
            if let Err(error) = identity.check(&statement, &self.weightsync) {
                tracing::warn!(version = statement.held.version, %error, "a member presents a statement that proves nothing");
                continue;
            }
            proven.push(Announced::from(&statement));
            if self.genuine.len() >= REMEMBERED {
                self.genuine.clear();
            }
            self.genuine.insert(statement);
        }
        proven
    }
}
