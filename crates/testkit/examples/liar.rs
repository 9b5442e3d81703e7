//! A rollout pod that lies ([`weightsync_testkit::liar`]). Settings are those of the sidecar.
//!
//! `TEST_LIE` selects one lie by its number, and `TEST_LIE_FILE` the file that exists during it. Without them it
//! makes every false claim once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::path::Path;

use weightsync_testkit::liar::{Lie, Settings, lie_while, tell_all};

#[tokio::main]
async fn main() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = Settings::from_env();
    match std::env::var("TEST_LIE") {
        Ok(number) => {
            let lie = Lie::ALL[number.trim().parse::<usize>().expect("TEST_LIE is a number")];
            let file = std::env::var("TEST_LIE_FILE").expect("TEST_LIE_FILE is set");
            lie_while(lie, Path::new(&file), &settings).await;
        }
        Err(_) => tell_all(&settings).await,
    }
}
