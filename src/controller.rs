//! Reconciles `WeightSync` resources: observe, decide, apply, report.
