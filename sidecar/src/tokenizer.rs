//! The model's tokenizer as the proxy uses it: a failure to load it fails each prompt, and never a request.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use crate::request::Tokenize;
use crate::tokenize::ModelTokenizer;

/// Loads a model folder off the event loop; beside the tokenizer comes what is wrong with it from the start.
pub async fn load(path: PathBuf) -> (Arc<dyn Tokenize>, Option<String>) {
    let load = move || ModelTokenizer::load(&path).map_err(|error| error.to_string());
    let loaded = tokio::task::spawn_blocking(load).await;
    let why = match loaded {
        Ok(Ok(tokenizer)) => {
            let problem = tokenizer.template_error();
            return (Arc::new(Loaded(tokenizer)), problem);
        }
        Ok(Err(why)) => why,
        Err(_) => "the tokenizer could not be read because of a fault in the router".to_owned(),
    };
    (Arc::new(Missing(why.clone())), Some(why))
}

struct Loaded(ModelTokenizer);

impl Tokenize for Loaded {
    fn encode_text(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        self.0
            .encode(text, add_special_tokens)
            .map_err(|error| error.to_string())
    }

    fn encode_chat(&self, body: &Value) -> Result<Vec<u32>, String> {
        self.0.encode_chat(body).map_err(|error| error.to_string())
    }
}

/// Stands for a tokenizer that could not be loaded.
struct Missing(String);

impl Tokenize for Missing {
    fn encode_text(&self, _text: &str, _add_special_tokens: bool) -> Result<Vec<u32>, String> {
        Err(self.0.clone())
    }

    fn encode_chat(&self, _body: &Value) -> Result<Vec<u32>, String> {
        Err(self.0.clone())
    }
}
