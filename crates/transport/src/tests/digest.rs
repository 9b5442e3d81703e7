use bytes::Bytes;

use super::fixture::buckets;
use crate::digest::digest_by;
use weightsync_core::weights::{BLOCK_BYTES, bucket_digest};

#[tokio::test]
async fn any_number_of_cores_gives_the_same_digest() {
    let (stream, _) = buckets(&[3 * BLOCK_BYTES + 77]);
    for length in [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, stream.len()] {
        for workers in [0, 1, 2, 3, 4, 9] {
            let bytes = Bytes::copy_from_slice(&stream[..length]);
            assert_eq!(digest_by(workers, bytes).await.unwrap(), bucket_digest(&stream[..length]), "{length} bytes, {workers} cores");
        }
    }
}
