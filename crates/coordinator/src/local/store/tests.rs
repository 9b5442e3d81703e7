use super::FileStore;
use crate::{EpochStore, PersistError};
use weightsync_core::protocol::EpochId;

fn id(epoch: u64) -> EpochId {
    EpochId { weightsync: "w".into(), created: 1, term: 0, epoch }
}

#[tokio::test]
async fn an_epoch_is_kept_and_never_goes_back() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::new(folder.path());
    assert_eq!(store.read(), Ok(0));
    store.persist(&id(3)).await.unwrap();
    store.persist(&id(3)).await.unwrap();
    assert_eq!(store.read(), Ok(3));
    assert!(matches!(store.persist(&id(2)).await, Err(PersistError::Conflict(_))));
    std::fs::write(folder.path().join("epoch"), "x").unwrap();
    assert!(matches!(store.persist(&id(4)).await, Err(PersistError::Other(_))));
}
