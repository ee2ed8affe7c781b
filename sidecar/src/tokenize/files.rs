//! Reading a model folder: special tokens, chat templates, and whether the engine renders chats by other means.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::TokenizeError;
use crate::bounded;

/// What a model folder says beside its `tokenizer.json`.
#[derive(Debug, Default)]
pub(super) struct ModelFiles {
    /// Special tokens by name (`bos_token`, ...); absent when unset, which templates can tell from empty.
    pub(super) special_tokens: BTreeMap<String, String>,
    /// Tokens of `added_tokens_decoder` with their ids, in the order of the ids.
    pub(super) added_tokens: Vec<AddedTokenEntry>,
    /// Chat templates by name; `default` and `tool_use` have a meaning.
    pub(super) templates: BTreeMap<String, String>,
    /// Template of the model's processor, which is preferred when a request brings no tools.
    pub(super) processor_template: Option<String>,
    /// Why the engine does not use the chat template at all.
    pub(super) foreign_chat_format: Option<String>,
}

/// One entry of `added_tokens_decoder`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AddedTokenEntry {
    pub(super) content: String,
    pub(super) special: bool,
    pub(super) normalized: bool,
    pub(super) lstrip: bool,
    pub(super) rstrip: bool,
    pub(super) single_word: bool,
}

/// Largest file read from a model folder; the biggest known tokenizer has 28 MB.
const MAX_FILE_BYTES: u64 = 256 * 1024 * 1024;

const SPECIAL_TOKEN_NAMES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Architectures that vLLM renders with an encoder of its own.
///
/// # Source
/// vLLM 0.32 `config/model.py` (defaults of `tokenizer_mode`) and `renderers/registry.py`.
const FOREIGN_ARCHITECTURES: [&str; 7] = [
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
];

impl ModelFiles {
    /// Reads everything but `tokenizer.json`; every file is optional.
    pub(super) fn read(folder: &Path) -> Result<Self, TokenizeError> {
        let mut files = Self::default();
        let config_path = folder.join("tokenizer_config.json");
        let config = read_object(&config_path)?.unwrap_or_default();
        files.read_special_tokens(&config);
        if let Some(map) = read_object(&folder.join("special_tokens_map.json"))? {
            files.read_special_tokens(&map);
        }
        files.read_added_tokens(&config_path, &config)?;
        files.read_templates(folder, &config_path, &config)?;
        files.foreign_chat_format = foreign_chat_format(folder)?;
        Ok(files)
    }

    /// Takes the special tokens that are not yet known; an entry is a string or an object with `content`.
    fn read_special_tokens(&mut self, object: &Map<String, Value>) {
        for name in SPECIAL_TOKEN_NAMES {
            let content = match object.get(name) {
                Some(Value::String(content)) => content,
                Some(Value::Object(token)) => match token.get("content") {
                    Some(Value::String(content)) => content,
                    _ => continue,
                },
                _ => continue,
            };
            self.special_tokens
                .entry(name.to_owned())
                .or_insert_with(|| content.clone());
        }
    }

    fn read_added_tokens(
        &mut self,
        path: &Path,
        config: &Map<String, Value>,
    ) -> Result<(), TokenizeError> {
        let Some(Value::Object(entries)) = config.get("added_tokens_decoder") else {
            return Ok(());
        };
        let mut by_id = BTreeMap::new();
        for (id, token) in entries {
            let id: u32 = id.parse().map_err(|_| {
                TokenizeError::load(
                    path,
                    format!("added_tokens_decoder has the id {id:?}, expected an integer"),
                )
            })?;
            let Some(content) = token.get("content").and_then(Value::as_str) else {
                return Err(TokenizeError::load(
                    path,
                    format!("added_tokens_decoder.{id} has no text in `content`"),
                ));
            };
            let flag = |name: &str, default: bool| {
                token.get(name).and_then(Value::as_bool).unwrap_or(default)
            };
            let special = flag("special", false);
            by_id.insert(
                id,
                AddedTokenEntry {
                    content: content.to_owned(),
                    special,
                    normalized: flag("normalized", !special),
                    lstrip: flag("lstrip", false),
                    rstrip: flag("rstrip", false),
                    single_word: flag("single_word", false),
                },
            );
        }
        self.added_tokens = by_id.into_values().collect();
        Ok(())
    }

    /// A `chat_template.jinja` wins over the configuration's entry, as it does in transformers.
    fn read_templates(
        &mut self,
        folder: &Path,
        config_path: &Path,
        config: &Map<String, Value>,
    ) -> Result<(), TokenizeError> {
        if let Some(text) = read_text(&folder.join("chat_template.jinja"))? {
            self.templates.insert("default".to_owned(), text);
        }
        self.read_named_templates(&folder.join("additional_chat_templates"))?;
        if self.templates.is_empty() {
            self.templates = templates_of_config(config_path, config.get("chat_template"))?;
        }
        let json_path = folder.join("chat_template.json");
        if let Some(object) = read_object(&json_path)? {
            let Some(Value::String(text)) = object.get("chat_template") else {
                return Err(TokenizeError::load(
                    &json_path,
                    "`chat_template` is not text",
                ));
            };
            let has_processor = ["processor_config.json", "preprocessor_config.json"]
                .iter()
                .any(|name| folder.join(name).exists());
            if has_processor {
                self.processor_template = Some(text.clone());
            }
            if self.templates.is_empty() {
                self.templates.insert("default".to_owned(), text.clone());
            }
        }
        Ok(())
    }

    fn read_named_templates(&mut self, folder: &Path) -> Result<(), TokenizeError> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(TokenizeError::load(folder, error)),
        };
        for entry in entries {
            let path = entry
                .map_err(|error| TokenizeError::load(folder, error))?
                .path();
            if path
                .extension()
                .is_none_or(|extension| extension != "jinja")
            {
                continue;
            }
            if let (Some(name), Some(text)) = (path.file_stem(), read_text(&path)?) {
                self.templates
                    .insert(name.to_string_lossy().into_owned(), text);
            }
        }
        Ok(())
    }
}

/// Reads `chat_template` of `tokenizer_config.json`: text, or a list of `{name, template}`.
fn templates_of_config(
    path: &Path,
    value: Option<&Value>,
) -> Result<BTreeMap<String, String>, TokenizeError> {
    let mut templates = BTreeMap::new();
    match value {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => {
            templates.insert("default".to_owned(), text.clone());
        }
        Some(Value::Array(entries)) => {
            for entry in entries {
                let (Some(name), Some(text)) = (
                    entry.get("name").and_then(Value::as_str),
                    entry.get("template").and_then(Value::as_str),
                ) else {
                    return Err(TokenizeError::load(
                        path,
                        "an entry of `chat_template` lacks `name` or `template`",
                    ));
                };
                templates.insert(name.to_owned(), text.to_owned());
            }
        }
        Some(_) => {
            return Err(TokenizeError::load(
                path,
                "`chat_template` is neither text nor a list of {name, template}",
            ));
        }
    }
    Ok(templates)
}

/// Tells why the engine would not use the folder's chat template, if so.
fn foreign_chat_format(folder: &Path) -> Result<Option<String>, TokenizeError> {
    let config = read_object(&folder.join("config.json"))?.unwrap_or_default();
    if config.get("model_type").and_then(Value::as_str) == Some("gpt_oss") {
        return Ok(Some(
            "chats of gpt_oss, which engines render as Harmony".to_owned(),
        ));
    }
    let architectures = config.get("architectures").and_then(Value::as_array);
    for name in architectures
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        if FOREIGN_ARCHITECTURES.contains(&name) {
            return Ok(Some(format!(
                "chats of {name}, which engines render with an encoder of its own"
            )));
        }
    }
    // vLLM takes the Mistral tokenizer when it finds both the consolidated weights and a tekken or sentencepiece file.
    let mut consolidated = false;
    let mut mistral_tokenizer = false;
    if let Ok(entries) = fs::read_dir(folder) {
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            consolidated |= name.starts_with("consolidated") && name.ends_with(".safetensors");
            mistral_tokenizer |= name == "tekken.json" || name.starts_with("tokenizer.model.v");
        }
    }
    if consolidated && mistral_tokenizer {
        return Ok(Some(
            "chats of a Mistral-format model, which engines render without its template".to_owned(),
        ));
    }
    Ok(None)
}

/// Reads a JSON object; `None` when there is no such file.
fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, TokenizeError> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| TokenizeError::load(path, error))
}

/// Reads a text file of bounded size; `None` when there is no such file.
pub(super) fn read_text(path: &Path) -> Result<Option<String>, TokenizeError> {
    match bounded::read_text(path, MAX_FILE_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TokenizeError::load(path, error)),
    }
}
