//! JavaScript values as Rust's, checked: what has another type or is out of range is named.
//!
//! napi's own conversions throw with codes of their own and wrap numbers around, so every argument comes as the type that is
//! wanted or as anything else, and the second is refused here.

use std::collections::HashMap;

use napi::bindgen_prelude::{
    Array, BigInt, Env, FnArgs, FromNapiValue, Function, JsObjectValue, Object, Uint8ArraySlice,
    Unknown,
};
use napi::{Either, JsValue, ValueType};
use napi_derive::napi;

use crate::error::{Result, invalid, of_napi};

/// A value of the type that is wanted, or any other.
pub(crate) type Given<'a, T> = Either<T, Unknown<'a>>;

/// Read from JavaScript; `null` and `undefined` are absent.
pub(crate) trait Read<'a>: Sized {
    /// As napi brings it.
    type Js: FromNapiValue;
    /// Reads it; errors call it `name`.
    fn read(js: Self::Js, name: &str) -> Result<Option<Self>>;
}

/// Reads an argument that must be there.
pub(crate) fn need<'a, T: Read<'a>>(js: T::Js, name: &str) -> Result<T> {
    T::read(js, name)?.ok_or_else(|| invalid(format!("{name} is missing")))
}

/// Reads an argument that may be left out.
pub(crate) fn maybe<'a, T: Read<'a>>(js: Option<T::Js>, name: &str) -> Result<Option<T>> {
    js.map_or(Ok(None), |js| T::read(js, name))
}

/// Accepts what is absent and refuses anything else.
pub(crate) fn absent<T>(other: Unknown<'_>, name: &str, wanted: &str) -> Result<Option<T>> {
    match other.get_type().map_err(of_napi)? {
        ValueType::Undefined | ValueType::Null => Ok(None),
        kind => Err(invalid(format!(
            "{name} must be {wanted}, not {}",
            kind.to_string().to_lowercase()
        ))),
    }
}

impl<'a> Read<'a> for String {
    type Js = Given<'a, Self>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        match js {
            Either::A(text) => Ok(Some(text)),
            Either::B(other) => absent(other, name, "a string"),
        }
    }
}

impl<'a> Read<'a> for bool {
    type Js = Given<'a, Self>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        match js {
            Either::A(value) => Ok(Some(value)),
            Either::B(other) => absent(other, name, "true or false"),
        }
    }
}

impl<'a> Read<'a> for f64 {
    type Js = Given<'a, Self>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        match js {
            Either::A(number) => Ok(Some(number)),
            Either::B(other) => absent(other, name, "a number"),
        }
    }
}

impl<'a> Read<'a> for u32 {
    type Js = Given<'a, f64>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        f64::read(js, name)?
            .map(|number| {
                whole(number, name, 0.0, f64::from(Self::MAX)).map(|number| {
                    #[expect(
                        clippy::cast_possible_truncation,
                        clippy::cast_sign_loss,
                        reason = "in range"
                    )]
                    let number = number as Self;
                    number
                })
            })
            .transpose()
    }
}

impl<'a> Read<'a> for i32 {
    type Js = Given<'a, f64>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        f64::read(js, name)?
            .map(|number| {
                whole(number, name, f64::from(Self::MIN), f64::from(Self::MAX)).map(|number| {
                    #[expect(clippy::cast_possible_truncation, reason = "in range")]
                    let number = number as Self;
                    number
                })
            })
            .transpose()
    }
}

/// Numbers above 2^53 have lost bits, so they must come as `BigInt`.
impl<'a> Read<'a> for u64 {
    type Js = Either<f64, Given<'a, BigInt>>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        match js {
            Either::A(number) =>
            {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "in range"
                )]
                whole(number, name, 0.0, MAX_SAFE).map(|number| Some(number as Self))
            }
            Either::B(Either::A(number)) => match number.get_u64() {
                (false, number, true) => Ok(Some(number)),
                _ => Err(invalid(format!(
                    "{name} is out of range: 0 to {} is accepted",
                    Self::MAX
                ))),
            },
            Either::B(Either::B(other)) => absent(other, name, "a number or a bigint"),
        }
    }
}

impl<'a> Read<'a> for Vec<String> {
    type Js = Given<'a, Array<'a>>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        items(js, name, "an array of strings")
    }
}

impl<'a> Read<'a> for Vec<MediaItem> {
    type Js = Given<'a, Array<'a>>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        items(js, name, "an array of media items")
    }
}

/// Bytes, copied.
impl<'a> Read<'a> for Vec<u8> {
    type Js = Given<'a, Uint8ArraySlice<'a>>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        match js {
            Either::A(bytes) => Ok(Some(bytes.to_vec())),
            Either::B(other) => absent(other, name, "a Buffer or Uint8Array"),
        }
    }
}

impl<'a> Read<'a> for HashMap<String, String> {
    type Js = Given<'a, Object<'a>>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        let object = match js {
            Either::A(object) => object,
            Either::B(other) => return absent(other, name, "an object of strings"),
        };
        let mut read = Self::new();
        for key in Object::keys(&object).map_err(of_napi)? {
            if let Some(value) = field::<String>(&object, &key)? {
                read.insert(key, value);
            }
        }
        Ok(Some(read))
    }
}

/// The JSON of a value, as `JSON.stringify` writes it.
pub(crate) struct Json(pub(crate) String);

impl<'a> Read<'a> for Json {
    type Js = Unknown<'a>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        if let ValueType::Undefined | ValueType::Null = js.get_type().map_err(of_napi)? {
            return Ok(None);
        }
        let stringify = || {
            Env::from_raw(js.value().env)
                .get_global()?
                .get_named_property_unchecked::<Object<'_>>("JSON")?
                .get_named_property_unchecked::<Function<'_, FnArgs<(Unknown<'_>,)>, Given<'_, String>>>("stringify")?
                .call(FnArgs::from((js,)))
        };
        match stringify() {
            Ok(Either::A(json)) => Ok(Some(Self(json))),
            Ok(Either::B(_)) => Err(invalid(format!("{name} has no JSON"))),
            Err(error) => Err(invalid(format!("{name} has no JSON: {}", error.reason))),
        }
    }
}

/// Reads a property; absent when it is `undefined` or `null`.
pub(crate) fn field<'a, T: Read<'a>>(object: &Object<'a>, name: &str) -> Result<Option<T>> {
    maybe(object.get::<T::Js>(name).map_err(of_napi)?, name)
}

/// Reads an array's elements, each of which must be there.
fn items<'a, T: Read<'a>>(
    js: Given<'a, Array<'a>>,
    name: &str,
    wanted: &str,
) -> Result<Option<Vec<T>>> {
    let array = match js {
        Either::A(array) => array,
        Either::B(other) => return absent(other, name, wanted),
    };
    (0..array.len())
        .map(|index| {
            let name = format!("{name}[{index}]");
            let item = array.get::<T::Js>(index).map_err(of_napi)?;
            maybe(item, &name)?.ok_or_else(|| invalid(format!("{name} is missing")))
        })
        .collect::<Result<_>>()
        .map(Some)
}

pub(crate) fn whole(number: f64, name: &str, min: f64, max: f64) -> Result<f64> {
    if number.fract() == 0.0 && (min..=max).contains(&number) {
        return Ok(number);
    }
    Err(invalid(format!(
        "{name} {number} is out of range: whole numbers from {min} to {max} are accepted"
    )))
}

/// `Number.MAX_SAFE_INTEGER`.
const MAX_SAFE: f64 = 9_007_199_254_740_991.0;

/// Declares an object of options: its TypeScript type, and how it is read. Unknown keys are refused by name.
macro_rules! options {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $key:literal $field:ident: $type:ty,)+ }) => {
        $(#[$meta])*
        #[napi(object, object_from_js = false)]
        #[derive(Default)]
        #[expect(missing_debug_implementations, reason = "it is read and used at once")]
        pub struct $name {
            $($(#[$field_meta])* pub $field: Option<$type>,)+
        }

        impl<'a> $crate::read::Read<'a> for $name {
            type Js = $crate::read::Given<'a, napi::bindgen_prelude::Object<'a>>;

            fn read(js: Self::Js, name: &str) -> $crate::error::Result<Option<Self>> {
                let object = match js {
                    napi::Either::A(object) => object,
                    napi::Either::B(other) => return $crate::read::absent(other, name, "an object"),
                };
                let mut read = Self::default();
                // Only the keys that are there cost something.
                for key in napi::bindgen_prelude::Object::keys(&object).map_err($crate::error::of_napi)? {
                    match &*key {
                        $($key => read.$field = $crate::read::field(&object, $key)?,)+
                        _ => return Err($crate::read::unknown_key(&key, name, &[$($key),+])),
                    }
                }
                Ok(Some(read))
            }
        }
    };
}
pub(crate) use options;

pub(crate) fn unknown_key(
    key: &str,
    name: &str,
    known: &[&str],
) -> napi::Error<crate::error::Code> {
    invalid(format!(
        "{name} has the unknown key {key:?}; there are: {}",
        known.join(", ")
    ))
}

/// An image, sound or video within a prompt.
#[napi(object, object_from_js = false)]
#[derive(Debug)]
pub struct MediaItem {
    /// Position of its first placeholder token.
    pub offset: u32,
    /// Number of placeholder tokens.
    pub length: u32,
    /// What identifies its content; must equal the engine's identifier.
    #[napi(ts_type = "Uint8Array")]
    pub digest: Vec<u8>,
}

impl<'a> Read<'a> for MediaItem {
    type Js = Given<'a, Object<'a>>;

    fn read(js: Self::Js, name: &str) -> Result<Option<Self>> {
        let object = match js {
            Either::A(object) => object,
            Either::B(other) => return absent(other, name, "an object"),
        };
        match (
            field(&object, "offset")?,
            field(&object, "length")?,
            field(&object, "digest")?,
        ) {
            (Some(offset), Some(length), Some(digest)) => Ok(Some(Self {
                offset,
                length,
                digest,
            })),
            _ => Err(invalid(format!(
                "{name} must have offset, length and digest"
            ))),
        }
    }
}
