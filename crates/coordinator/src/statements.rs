//! Checks the statements that members present, each once.
//!
//! Decides which are genuine: a source of this object signed them. What follows is membership's.

use std::collections::HashSet;

use weightsync_core::protocol::{Announced, STATEMENTS, Statement};
use weightsync_net::identity::Identity;

/// Genuine statements that are remembered, so that a thousand replicas that present the same one cost one check.
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

    /// What is proven by statements that were not seen before.
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
