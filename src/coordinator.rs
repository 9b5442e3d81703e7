//! Carries out membership decisions towards agents: enrols them, reads their events, sends prepare, commit and fence.
//!
//! Used by the controller and by `weightsync local`. Decides nothing about membership and knows no Kubernetes.
