//! Prompts: tokens in any of their forms, text, or messages.

use std::borrow::Cow;

use kvlane::{BlockHashes, BlockSize, MediaSpan, Prompt, SaltContext, block_hashes, chat, text};
use napi::bindgen_prelude::{
    Array, BigInt64ArraySlice, Either7, Int32ArraySlice, Object, Uint8ArraySlice, Uint32ArraySlice,
    Unknown,
};
use napi::{Either, JsValue};
use napi_derive::napi;

use crate::error::{Result, invalid, of_napi, to_js};
use crate::read::{Json, MediaItem, Read, field, options, unknown_key, whole};

/// A prompt as it is given.
pub(crate) type GivenPrompt<'a> = Either7<
    Uint32ArraySlice<'a>,
    String,
    Int32ArraySlice<'a>,
    BigInt64ArraySlice<'a>,
    Uint8ArraySlice<'a>,
    Either<Array<'a>, Object<'a>>,
    Unknown<'a>,
>;

/// A prompt that has been read.
pub(crate) enum Content<'a> {
    Tokens(Cow<'a, [u32]>),
    Text(String),
    Chat { messages: Json, tools: Option<Json> },
}

/// What a prompt's hashes depend on beside its content.
#[derive(Default)]
pub(crate) struct Salt {
    lora: Option<String>,
    salt: Option<String>,
    media: Vec<MediaSpan>,
}

impl Salt {
    pub(crate) fn new(
        lora: Option<String>,
        salt: Option<String>,
        media: Option<Vec<MediaItem>>,
    ) -> Self {
        let media = media.unwrap_or_default().into_iter();
        let media = media.map(|item| MediaSpan {
            offset_tokens: item.offset as usize,
            length_tokens: item.length as usize,
            digest: item.digest,
        });
        Self {
            lora,
            salt,
            media: media.collect(),
        }
    }

    fn context(&self) -> SaltContext<'_> {
        SaltContext {
            lora: self.lora.as_deref(),
            salt: self.salt.as_deref(),
            media: &self.media,
        }
    }
}

impl<'a> Content<'a> {
    pub(crate) fn read(given: &'a GivenPrompt<'a>) -> Result<Self> {
        Ok(match given {
            Either7::A(tokens) => Self::Tokens(Cow::Borrowed(tokens)),
            Either7::B(text) => Self::Text(text.clone()),
            Either7::C(tokens) => Self::Tokens(checked(tokens)?.into()),
            Either7::D(tokens) => Self::Tokens(checked(tokens)?.into()),
            Either7::E(bytes) => Self::Tokens(from_bytes(bytes)?.into()),
            Either7::F(Either::A(tokens)) => Self::Tokens(from_numbers(tokens)?.into()),
            Either7::F(Either::B(object)) => return Self::of_object(object),
            Either7::G(other) => {
                let kind = other.get_type().map_err(of_napi)?;
                return Err(refused(&kind.to_string().to_lowercase()));
            }
        })
    }

    fn of_object(object: &Object<'_>) -> Result<Self> {
        if object.is_typedarray().map_err(of_napi)? || object.is_dataview().map_err(of_napi)? {
            return Err(refused("an array of another type"));
        }
        for key in Object::keys(object).map_err(of_napi)? {
            if !CHAT_KEYS.contains(&&*key) {
                return Err(unknown_key(&key, "the prompt", CHAT_KEYS));
            }
        }
        let messages = field::<Json>(object, "messages")?;
        let tools = field::<Json>(object, "tools")?;
        match (field::<String>(object, "text")?, messages) {
            (Some(text), None) if tools.is_none() => Ok(Self::Text(text)),
            (None, Some(messages)) => Ok(Self::Chat { messages, tools }),
            _ => Err(refused("an object without either text or messages")),
        }
    }

    /// Hashes the prompt's complete blocks, or chunks of text.
    pub(crate) fn hashes(&self, block_size: BlockSize, salt: &Salt) -> Result<BlockHashes> {
        let salt = salt.context();
        match self {
            Self::Tokens(tokens) => Ok(block_hashes(tokens, block_size, &salt)),
            Self::Text(content) => Ok(text::text_hashes(content, &salt)),
            Self::Chat { messages, tools } => {
                let tools = tools.as_ref().map(|tools| &*tools.0);
                chat::hashes(&[], &messages.0, tools, &salt).map_err(to_js)
            }
        }
    }

    /// Reduces the prompt to what routing needs.
    pub(crate) fn prompt(&self, block_size: BlockSize, salt: &Salt) -> Result<Prompt> {
        match self {
            Self::Tokens(tokens) => Ok(Prompt::from_tokens(tokens, block_size, &salt.context())),
            Self::Text(_) | Self::Chat { .. } => {
                Ok(Prompt::from_text(self.hashes(block_size, salt)?))
            }
        }
    }
}

options! {
    /// What the hashes of a prompt depend on beside its tokens.
    HashOptions {
        /// Tokens per block (default 16).
        "blockSize" block_size: u32,
        /// Adapter (LoRA) name; empty or absent is the base model.
        "lora" lora: String,
        /// Cache salt; empty or absent is none.
        "salt" salt: String,
        /// Media items, in any order.
        "media" media: Vec<MediaItem>,
    }
}

const CHAT_KEYS: &[&str] = &["text", "messages", "tools"];

fn refused(given: &str) -> napi::Error<crate::error::Code> {
    invalid(format!(
        "the prompt must be tokens (Uint32Array, Buffer of little-endian u32, Int32Array, BigInt64Array, number[]), a string, \
         {{ text }} or {{ messages, tools }}, not {given}"
    ))
}

fn checked<T: Copy + Into<i64>>(tokens: &[T]) -> Result<Vec<u32>> {
    let checked = tokens.iter().enumerate().map(|(index, token)| {
        let token: i64 = (*token).into();
        u32::try_from(token).map_err(|_| out_of_range(index, &token.to_string()))
    });
    checked.collect()
}

fn from_bytes(bytes: &[u8]) -> Result<Vec<u32>> {
    let (tokens, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(invalid(format!(
            "a buffer of {} bytes holds no whole tokens: 4 bytes each, little-endian, are accepted",
            bytes.len()
        )));
    }
    Ok(tokens
        .iter()
        .map(|token| u32::from_le_bytes(*token))
        .collect())
}

fn from_numbers(numbers: &Array<'_>) -> Result<Vec<u32>> {
    let read = (0..numbers.len()).map(|index| {
        let name = format!("tokens[{index}]");
        let token = numbers
            .get::<<u32 as Read<'_>>::Js>(index)
            .map_err(of_napi)?;
        match token {
            Some(Either::A(token)) => {
                let token = whole(token, &name, 0.0, f64::from(u32::MAX))?;
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "in range"
                )]
                Ok(token as u32)
            }
            _ => Err(invalid(format!("{name} must be a number"))),
        }
    });
    read.collect()
}

fn out_of_range(index: usize, token: &str) -> napi::Error<crate::error::Code> {
    invalid(format!(
        "tokens[{index}] {token} is out of range: 0 to {} is accepted",
        u32::MAX
    ))
}
