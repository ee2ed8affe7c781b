//! The model's tokenizer as the proxy uses it: a failure to load it fails each prompt, and never a request.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use crate::request::Tokenize;
use crate::tokenize::{ModelTokenizer, TokenizeError};

/// Loads a model folder off the event loop; beside the tokenizer comes what is wrong with it from the start.
pub async fn load(path: PathBuf) -> (Arc<dyn Tokenize>, Option<String>) {
    let load = move || ModelTokenizer::load(&path);
    let loaded = tokio::task::spawn_blocking(load).await;
    let why = match loaded {
        Ok(Ok(tokenizer)) => {
            let problem = tokenizer.template_error();
            return (Arc::new(Loaded(tokenizer)), problem);
        }
        Ok(Err(why)) => why,
        Err(_) => TokenizeError::Encode("reading it ended in a fault of the router".to_owned()),
    };
    let said = why.to_string();
    (Arc::new(Missing(why)), Some(said))
}

struct Loaded(ModelTokenizer);

impl Tokenize for Loaded {
    fn encode_text(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizeError> {
        self.0.encode(text, add_special_tokens)
    }

    fn encode_chat(&self, body: &Value) -> Result<Vec<u32>, TokenizeError> {
        self.0.encode_chat(body)
    }
}

/// Stands for a tokenizer that could not be loaded.
struct Missing(TokenizeError);

impl Tokenize for Missing {
    fn encode_text(
        &self,
        _text: &str,
        _add_special_tokens: bool,
    ) -> Result<Vec<u32>, TokenizeError> {
        Err(self.0.clone())
    }

    fn encode_chat(&self, _body: &Value) -> Result<Vec<u32>, TokenizeError> {
        Err(self.0.clone())
    }
}
