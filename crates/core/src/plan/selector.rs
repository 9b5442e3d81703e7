//! Which pods a part of the spec selects. The meaning is that of a Kubernetes label selector, but an empty one selects nothing.

use std::collections::{BTreeMap, BTreeSet};

/// A label selector: all of its requirements must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    /// Labels with their values.
    pub labels: BTreeMap<String, String>,
    /// Further requirements.
    pub requirements: Vec<Requirement>,
}

/// One requirement of a selector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The label.
    pub key: String,
    /// The condition for its value.
    pub operator: Operator,
}

/// A condition for a label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operator {
    /// Present with one of these values.
    In(BTreeSet<String>),
    /// Absent, or present with none of these values.
    NotIn(BTreeSet<String>),
    /// Present.
    Exists,
    /// Absent.
    DoesNotExist,
}

impl Selector {
    /// Whether it has no requirements.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.requirements.is_empty()
    }

    /// Whether it selects a pod with these labels. An empty selector selects nothing: no user means the whole namespace.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        !self.is_empty()
            && self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.requirements.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        match &self.operator {
            Operator::In(values) => value.is_some_and(|value| values.contains(value)),
            Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}
