//! The Kubernetes resource `WeightSync`: types, conditions, validation.
