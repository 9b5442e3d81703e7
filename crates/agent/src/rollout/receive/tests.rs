use std::sync::mpsc::{Sender, channel};
use std::sync::{OnceLock, Weak};
use std::time::Duration;

use super::*;
use crate::rollout::version_dir::AgentDir;
use weightsync_core::protocol::EpochId;
use weightsync_core::weights::{Dtype, TensorSpec};

/// Lets the version go while bytes are written, as the end of an epoch may.
struct Ends(Arc<OnceLock<Weak<Receiver>>>);

impl Listener for Ends {
    fn moving(&self) {
        self.0.get().unwrap().upgrade().unwrap().discard();
    }
    fn received(&self, _: &UpdateId, _: u64) {}
    fn measured(&self, _: &UpdateId, _: &Transfer) {}
    fn streamed(&self, _: &UpdateId, _: u64) -> Result<(), Refusal> {
        Ok(())
    }
    fn broken(&self, _: &UpdateId, _: Fault<'_>, _: &str) {}
}

fn write_and_end(done: &Sender<[Result<(), RefusalCode>; 2]>) {
    let folder = tempfile::tempdir().unwrap();
    let (agent, _) = AgentDir::open(folder.path(), "a").unwrap();
    let tensor = TensorSpec::new("w".into(), Dtype::U8, vec![64]);
    let layout = Arc::new(Layout::new("model", vec![tensor], 0).unwrap());
    let plan = SafetensorsPlan::new(&layout, None).unwrap();
    let epoch = EpochId { weightsync: "w".into(), created: 1, term: 0, epoch: 1 };
    let update = UpdateId { epoch, version: 1, attempt: 1 };
    let this = Arc::new(OnceLock::new());
    let (listener, dir) = (Box::new(Ends(this.clone())), agent.version(1, 1).unwrap());
    let receiver = Receiver::create(update, layout, DigestAlgorithm::Gsum64, plan, dir, listener).unwrap();
    let receiver = Arc::new(receiver);
    this.set(Arc::downgrade(&receiver)).unwrap();
    let write = |offset| receiver.write(offset, &[7; 32]).map_err(|refusal| refusal.code);
    done.send([write(0), write(32)]).unwrap();
}

#[test]
fn an_epoch_may_end_while_bytes_are_written() {
    let (done, written) = channel();
    std::thread::spawn(move || write_and_end(&done));
    let written = written.recv_timeout(Duration::from_secs(20)).expect("neither waits for the other");
    assert_eq!(written, [Ok(()), Err(RefusalCode::WrongPhase)]);
}
