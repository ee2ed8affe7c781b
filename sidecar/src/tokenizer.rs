//! The model's tokenizer as the proxy uses it: a failure to load it fails each prompt, and never a request.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use crate::request::Tokenize;
use crate::tokenize::ModelTokenizer;

/// Loads a model folder off the event loop.
pub async fn load(path: PathBuf) -> Arc<dyn Tokenize> {
    let loaded = tokio::task::spawn_blocking(move || {
        ModelTokenizer::load(&path).map_err(|error| error.to_string())
    })
    .await;
    match loaded {
        Ok(Ok(tokenizer)) => Arc::new(Loaded(tokenizer)),
        Ok(Err(why)) => Arc::new(Missing(why)),
        Err(_) => Arc::new(Missing(
            "the tokenizer could not be read because of a fault in the router".to_owned(),
        )),
    }
}

struct Loaded(ModelTokenizer);

impl Tokenize for Loaded {
    fn encode_text(&self, text: &str) -> Result<Vec<u32>, String> {
        self.0.encode_text(text).map_err(|error| error.to_string())
    }

    fn encode_chat(&self, body: &Value) -> Result<Vec<u32>, String> {
        self.0.encode_chat(body).map_err(|error| error.to_string())
    }
}

/// Stands for a tokenizer that could not be loaded; the reason comes with the first prompt that wanted it.
struct Missing(String);

impl Tokenize for Missing {
    fn encode_text(&self, _text: &str) -> Result<Vec<u32>, String> {
        Err(self.0.clone())
    }

    fn encode_chat(&self, _body: &Value) -> Result<Vec<u32>, String> {
        Err(self.0.clone())
    }
}
