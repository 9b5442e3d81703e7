use super::*;
use weightsync_core::protocol::EpochId;
use weightsync_core::weights::{Dtype, TensorSpec};
use weightsync_transport::{Fault, Transfer};

/// Far longer than an answer takes.
const SOON: Duration = Duration::from_secs(20);

struct Deaf;

impl Listener for Deaf {
    fn moving(&self) {}
    fn received(&self, _: &UpdateId, _: u64) {}
    fn measured(&self, _: &UpdateId, _: &Transfer) {}
    fn streamed(&self, _: &UpdateId, _: u64) -> Result<(), Refusal> {
        Ok(())
    }
    fn broken(&self, _: &UpdateId, _: Fault<'_>, _: &str) {}
}

/// No engine at all.
struct Nothing;

#[async_trait]
impl Way for Nothing {
    type Arrived = ();
    type Order = ();
    const FAILED: &'static str = "it failed";
    const UNSETTLED: &'static str = "it did not settle";

    async fn carry_out(&mut self, _: &EngineReceiver<Self>, (): ()) -> Result<(), Undone> {
        Ok(())
    }

    fn compare(_: &EngineReceiver<Self>, (): (), _: &FinishRequest) -> Result<Manifest, String> {
        Err("nothing is compared".into())
    }

    async fn finish(self, _: HeldVersion) -> Result<InstallReport, InstallError> {
        Err(InstallError::before_start(weightsync_engine::EngineError::Cancelled))
    }

    async fn abandon(self, _: &str) -> Left {
        Left::AsBefore
    }
}

fn receiver() -> (EngineReceiver<Nothing>, mpsc::UnboundedReceiver<Order<Nothing>>) {
    let (orders, inbox) = mpsc::unbounded_channel();
    let epoch = EpochId { weightsync: "w".into(), created: 1, term: 0, epoch: 1 };
    let tensor = TensorSpec::new("w".into(), Dtype::U8, vec![64]);
    let receiver = EngineReceiver {
        update: UpdateId { epoch, version: 1, attempt: 1 },
        layout: Arc::new(Layout::new("model", vec![tensor], 0).unwrap()),
        algorithm: DigestAlgorithm::Gsum64,
        listener: Box::new(Deaf),
        arrived: Mutex::new(Some(())),
        begun: Instant::now(),
        limits: Limits { timeout: Duration::from_secs(600), silence: Duration::from_secs(600) },
        failed: Mutex::new(None),
        orders,
    };
    (receiver, inbox)
}

fn request(update: UpdateId) -> FinishRequest {
    FinishRequest { update, tensor_digests: Vec::new(), manifest_digest: String::new(), statement: None, check: false }
}

#[tokio::test]
async fn order_asked_after_the_end_is_answered() {
    let (receiver, inbox) = receiver();
    drop(inbox);
    let refusal = timeout(SOON, receiver.ask(())).await.expect("an answer").unwrap_err();
    assert_eq!(refusal, super::refusal(RefusalCode::EngineRefused, "the engine's install ended before"));
    assert!(!receiver.finish(HeldVersion { version: 1, manifest: String::new() }, false));
    let settled = timeout(SOON, receiver.conclude(&request(receiver.update.clone()))).await.expect("an answer");
    assert_eq!(settled.unwrap_err(), "it did not settle within 600s");
}

#[tokio::test]
async fn order_that_waits_at_the_end_is_answered() {
    let (receiver, inbox) = receiver();
    let (refused, ()) = tokio::join!(timeout(SOON, receiver.ask(())), async { drop(inbox) });
    assert_eq!(refused.expect("an answer").unwrap_err().code, RefusalCode::EngineRefused);
}
