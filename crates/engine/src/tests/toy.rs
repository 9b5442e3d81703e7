//! A new engine is one file and one line: this one serves a digest of the bytes that it loaded, and stands in a list of its own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::support::{TENSORS, held, job_of, write_checkpoint};
use crate::adapter::Adapter;
use crate::canary::LogProbs;
use crate::descriptor::{EngineDescriptor, Limit};
use crate::http::{EngineHttp, Until};
use crate::server::Server;
use crate::{Engine, EngineConfig, EngineError, Holding, connect_among};
use weightsync_core::protocol::{CanaryPolicy, EngineFacts, KvCachePolicy, PausePolicy};

const ENGINE: EngineDescriptor = EngineDescriptor {
    kind: "toy",
    api_kind: "Toy",
    port: 4000,
    needs: "a server of this test",
    limits: &[Limit {
        in_groups: false,
        pauses: &[PausePolicy::Keep],
        kv_caches: &[KvCachePolicy::Reset],
        cause: "the toy keeps requests and empties its cache",
        next_step: "set update.pause to Keep and update.kvCache to Reset",
    }],
    connect,
};

fn connect(config: EngineConfig) -> Result<Arc<dyn Engine>, EngineError> {
    let server = Toy { http: EngineHttp::new(&config)? };
    Ok(Arc::new(Adapter::new(server, config.served_model, None, config.processes)))
}

struct Toy {
    http: EngineHttp,
}

impl Toy {
    async fn field(&self, name: &str, until: Until) -> Result<String, EngineError> {
        self.http.get("/state", until).await?.json()?.string(name)
    }

    async fn set(&self, change: Value, until: Until) -> Result<(), EngineError> {
        self.http.post("/state", Some(&change), until).await?.json()?.must("done", &true.into()).map(drop)
    }
}

#[async_trait]
impl Server for Toy {
    fn descriptor(&self) -> &'static EngineDescriptor {
        &ENGINE
    }

    fn url(&self) -> &str {
        self.http.url()
    }

    async fn facts(&self, until: Until) -> Result<EngineFacts, EngineError> {
        Ok(EngineFacts {
            kind: ENGINE.kind.to_owned(),
            server_version: self.field("server", until).await?,
            size: 1,
            url: self.url().to_owned(),
            delivery: "load".to_owned(),
            answer_version: "none".to_owned(),
            unchecked: None,
            model_bytes: None,
            groups: None,
        })
    }

    async fn front(&self, until: Until) -> Result<(), EngineError> {
        self.field("server", until).await.map(drop)
    }

    async fn fingerprint(&self, _until: Until) -> Result<String, EngineError> {
        Ok("the only start".to_owned())
    }

    async fn holding(&self, until: Until) -> Result<Holding, EngineError> {
        Ok(Holding::parse(&self.field("version", until).await?))
    }

    async fn write(&self, holding: &Holding, until: Until) -> Result<(), EngineError> {
        self.set(json!({"version": holding.text()}), until).await
    }

    async fn pause(&self, _: PausePolicy, _: KvCachePolicy, until: Until) -> Result<(), EngineError> {
        self.set(json!({"paused": "yes"}), until).await
    }

    async fn is_paused(&self, until: Until) -> Result<bool, EngineError> {
        Ok(self.field("paused", until).await? == "yes")
    }

    async fn unpause(&self, until: Until) -> Result<(), EngineError> {
        self.set(json!({"paused": "no"}), until).await
    }

    async fn load(&self, directory: &Path, until: Until) -> Result<(), EngineError> {
        self.set(json!({"load": directory.join("model.safetensors")}), until).await
    }

    async fn clear_failed_load(&self, _until: Until) -> Result<(), EngineError> {
        Ok(())
    }

    async fn reset_cache(&self, _until: Until) -> Result<(), EngineError> {
        Ok(())
    }

    async fn generate(&self, until: Until) -> Result<(), EngineError> {
        self.field("serves", until).await.map(drop)
    }

    async fn log_probs(&self, _: &CanaryPolicy, _: Until) -> Result<LogProbs, EngineError> {
        Err(EngineError::Unsupported { what: "the toy has no log-probs".into(), next_step: "remove spec.canary".into() })
    }

    async fn abort_all(&self, _until: Until) -> Result<(), EngineError> {
        Ok(())
    }

    async fn startup_checkpoint(&self, until: Until) -> Result<String, EngineError> {
        self.field("model", until).await
    }
}

type Shared = Arc<Mutex<serde_json::Map<String, Value>>>;

async fn change(State(state): State<Shared>, Json(change): Json<Value>) -> Json<Value> {
    let mut state = state.lock();
    for (name, value) in change.as_object().unwrap() {
        if name == "load" {
            let bytes = std::fs::read(value.as_str().unwrap()).unwrap();
            state.insert("serves".to_owned(), blake3::hash(&bytes).to_hex().to_string().into());
        } else {
            state.insert(name.clone(), value.clone());
        }
    }
    Json(json!({"done": true}))
}

#[tokio::test]
async fn toy_engine_serves_a_version_after_one_line_in_a_list() {
    let folder = tempfile::tempdir().unwrap();
    for seed in 1..=2 {
        write_checkpoint(&folder.path().join(seed.to_string()), &TENSORS, seed);
    }
    let start = json!({"server": "1", "version": "default", "paused": "no", "serves": "", "model": folder.path().join("1")});
    let state: Shared = Arc::new(Mutex::new(start.as_object().unwrap().clone()));
    let show = |State(state): State<Shared>| async move { Json(Value::Object(state.lock().clone())) };
    let router = Router::new().route("/state", get(show)).route("/state", post(change)).with_state(state.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(async move { axum::serve(listener, router).await });

    let config = EngineConfig {
        kind: "toy".to_owned(),
        url,
        api_key: None,
        served_model: Some(folder.path().join("1")),
        record: None,
        owner: "test".into(),
        processes: "/proc".into(),
        unproven_routes: false,
    };
    let engine = connect_among(&[&ENGINE], config.clone()).unwrap();
    assert_eq!(engine.probe(Duration::from_secs(5)).await.unwrap().kind, "toy");
    let refused = engine.accepts(PausePolicy::Abort, KvCachePolicy::Reset).unwrap_err().to_string();
    assert!(refused.contains("keeps requests") && refused.contains("set update.pause to Keep"), "{refused}");
    engine.install(&job_of(&folder.path().join("2"), 2)).await.unwrap();
    let bytes = std::fs::read(folder.path().join("2/model.safetensors")).unwrap();
    let serves = state.lock()["serves"].clone();
    assert_eq!(serves, blake3::hash(&bytes).to_hex().to_string());
    assert_eq!(engine.holding(Duration::from_secs(5)).await.unwrap(), Holding::Version(held(2)));
    assert_eq!(state.lock()["paused"], "no");

    let unknown = connect_among(&[], config).err().unwrap().to_string();
    assert!(unknown.contains("there is no engine of the kind \"toy\""), "{unknown}");
    server.abort();
}
