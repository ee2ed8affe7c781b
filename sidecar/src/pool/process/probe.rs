//! Whether an engine that was started can serve.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use parking_lot::Mutex;
use serde_json::Value;

use crate::config::WorkerConfig;
use crate::forward::upstream::Pool;
use crate::scrape;

/// Asks one engine until it serves.
#[derive(Debug)]
pub(super) struct Probe {
    pool: Arc<Pool>,
    host: HeaderValue,
    missing: Mutex<String>,
}

const TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses between questions.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

impl Probe {
    pub(super) fn new(worker: &WorkerConfig) -> Self {
        let address = worker.url.address();
        let host = HeaderValue::from_str(&address.to_string());
        Self {
            pool: Arc::new(Pool::new(address.clone(), TIMEOUT, LONGEST * 2, 1)),
            host: host.unwrap_or(HeaderValue::from_static("worker")),
            missing: Mutex::new("it was not asked yet".to_owned()),
        }
    }

    /// Waits until the engine is healthy, lists its model, and tells its KV capacity: from then on it can be routed to and
    /// its load means something.
    pub(super) async fn until_ready(&self) {
        let mut pause = SHORTEST;
        while let Err(missing) = self.check().await {
            *self.missing.lock() = missing;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST);
        }
    }

    /// Says what is missing.
    pub(super) fn missing(&self) -> String {
        self.missing.lock().clone()
    }

    async fn check(&self) -> Result<(), String> {
        self.get("/health").await?;
        let models = self.get("/v1/models").await?;
        let models: Value = serde_json::from_slice(&models).unwrap_or_default();
        if models["data"].as_array().is_none_or(Vec::is_empty) {
            return Err("/v1/models lists no model".to_owned());
        }
        let metrics = self.get("/metrics").await?;
        let report = scrape::parse(&String::from_utf8_lossy(&metrics));
        report
            .capacity_tokens()
            .map(drop)
            .ok_or_else(|| "/metrics does not tell the KV capacity".to_owned())
    }

    async fn get(&self, path: &str) -> Result<Bytes, String> {
        match scrape::fetch(&self.pool, &self.host, path, 8 << 20, TIMEOUT).await {
            Ok((StatusCode::OK, body)) => Ok(body),
            Ok((status, _)) => Err(format!("{path} answered {status}")),
            Err(error) => Err(format!("{path}: {error}")),
        }
    }
}
