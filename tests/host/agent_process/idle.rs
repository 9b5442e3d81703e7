//! An engine that runs and is never updated. Tests of agents that need no server use it, in the host stage and in the controller's.

use std::time::Duration;

use async_trait::async_trait;
use weightsync_core::protocol::{EngineFacts, KvCachePolicy, PausePolicy};
use weightsync_core::weights::TensorSpec;
use weightsync_engine::{
    Engine, EngineError, EngineStart, Fit, Health, Holding, InstallError, InstallJob, InstallReport, Settled, Settling,
};

/// An engine that runs and is never updated here.
pub struct Idle;

#[async_trait]
impl Engine for Idle {
    fn kind(&self) -> &'static str {
        "idle"
    }
    async fn probe(&self, _deadline: Duration) -> Result<EngineFacts, EngineError> {
        Ok(EngineFacts {
            kind: "idle".into(),
            server_version: "1".into(),
            size: 1,
            url: "http://engine".into(),
            delivery: "none".into(),
            answer_version: "none".into(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        })
    }
    fn accepts(&self, _pause: PausePolicy, _kv_cache: KvCachePolicy) -> Result<(), EngineError> {
        Ok(())
    }
    fn fits(&self, _tensors: &[TensorSpec]) -> Result<Fit, EngineError> {
        Ok(Fit::WHOLE)
    }
    async fn health(&self, _deadline: Duration) -> Result<Health, EngineError> {
        Ok(Health { start: EngineStart("1".into()), holding: Some(Holding::Startup) })
    }
    async fn install(&self, _job: &InstallJob) -> Result<InstallReport, InstallError> {
        Err(InstallError::before_start(EngineError::Cancelled))
    }
    async fn settle(&self, _how: &Settling, _deadline: Duration) -> Result<Settled, InstallError> {
        Ok(Settled { start: EngineStart("1".into()), holding: Holding::Startup, resumed: false })
    }
    async fn put_back(&self, _deadline: Duration) -> Result<(), EngineError> {
        Ok(())
    }
    async fn holding(&self, _deadline: Duration) -> Result<Holding, EngineError> {
        Ok(Holding::Startup)
    }
}
