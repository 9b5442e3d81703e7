//! What tests of engines and of their simulators need: small checkpoints, and a plain HTTP client.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

/// Long enough for any call that works.
pub const SOON: Duration = Duration::from_secs(10);

/// Names and shapes of the model that the tests serve.
pub const TENSORS: [(&str, &[u64]); 4] =
    [("embed.weight", &[8, 4]), ("layer.q.weight", &[4, 4]), ("layer.k.weight", &[4, 4]), ("norm.weight", &[4])];

/// Writes a checkpoint of F32 tensors whose values follow from the seed.
pub fn write_checkpoint(directory: &Path, tensors: &[(&str, &[u64])], seed: u8) {
    std::fs::create_dir_all(directory).unwrap();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (index, (name, shape)) in tensors.iter().enumerate() {
        let begin = data.len();
        let elements = shape.iter().product::<u64>();
        let value = f32::from(seed) + f32::from(u8::try_from(index).unwrap());
        data.extend((0..elements).flat_map(|_| value.to_le_bytes()));
        header.insert((*name).to_owned(), json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(directory.join("model.safetensors"), file).unwrap();
}

/// A plain client of its own: what tests look at must not go through the code under test.
pub fn client() -> reqwest::Client {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth();
    reqwest::Client::builder().no_proxy().use_preconfigured_tls(tls).timeout(SOON).build().unwrap()
}

pub async fn get(url: &str) -> Value {
    client().get(url).send().await.unwrap().json().await.unwrap()
}

pub async fn post(url: &str, body: &Value) -> (u16, Value) {
    let reply = client().post(url).json(body).send().await.unwrap();
    (reply.status().as_u16(), reply.json().await.unwrap_or_default())
}

/// What the work comes to. It must end about when its deadline passes: what bounds it are timers that start one after another. A machine that is
/// late with the work's own deadline is as late with the first of them, so load alone fails no test.
pub async fn ended_by<T>(deadline: Duration, work: impl Future<Output = T>) -> T {
    let late = async {
        tokio::time::sleep(deadline).await;
        tokio::time::sleep(deadline.max(Duration::from_secs(1))).await;
    };
    tokio::select! {
        biased;
        done = work => done,
        () = late => panic!("it goes on long after its deadline of {deadline:?}"),
    }
}

/// Waits for a condition; tests never sleep for a guess.
pub async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let waiting = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(SOON, waiting).await.unwrap_or_else(|_| panic!("{what} did not happen"));
}
