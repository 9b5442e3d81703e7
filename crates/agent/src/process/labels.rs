//! The label that distinguishes the engines of a pod in metrics.

use prometheus_client::encoding::EncodeLabelSet;

pub(super) const PORT: &[(&str, &str)] = &[("port", "of the engine; 0 for a source")];

/// The value of that label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct OfEngine {
    pub(super) port: u16,
}
