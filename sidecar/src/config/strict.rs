//! A mapping where keys are expected: derived readers take a list as well, as the values of the keys in their order, which nobody
//! means.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{Deserializer, Error as _, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Error, Value};

/// Reads a value as [`Value`] itself is read, without lists for mappings at any depth.
pub(super) struct Strict(pub(super) Value);

impl<'de> IntoDeserializer<'de, Error> for Strict {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Strict {
    type Error = Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let found = match &self.0 {
            Value::Object(_) => return self.deserialize_any(visitor),
            Value::Array(_) => Unexpected::Other("a list"),
            Value::String(text) => Unexpected::Str(text),
            Value::Null => Unexpected::Other("nothing"),
            Value::Bool(value) => Unexpected::Bool(*value),
            Value::Number(_) => Unexpected::Other("a number"),
        };
        Err(Error::invalid_type(found, &"a mapping of its keys"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(list) => {
                let mut items = SeqDeserializer::new(list.into_iter().map(Self));
                let read = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(read)
            }
            Value::Object(fields) => {
                let fields = fields.into_iter();
                let mut fields =
                    MapDeserializer::new(fields.map(|(key, value)| (key, Self(value))));
                let read = visitor.visit_map(&mut fields)?;
                fields.end()?;
                Ok(read)
            }
            plain => plain.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.0.is_null() {
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    /// The choices of a configuration are words, in which nothing is nested.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Outer {
        one: Option<Inner>,
        list: Vec<Inner>,
        named: BTreeMap<String, Inner>,
        pair: (u16, f64),
        any: Value,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Inner {
        number: Newtype,
        word: Option<Word>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Newtype(u64);

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Word {
        Yes,
    }

    fn read(value: &Value) -> Result<Outer, Error> {
        Outer::deserialize(Strict(value.clone()))
    }

    fn valid() -> Value {
        json!({
            "one": {"number": 1, "word": "yes"}, "list": [{"number": 2}], "named": {"a": {"number": 3, "word": null}},
            "pair": [4, 5], "any": [{"b": [6]}],
        })
    }

    #[test]
    fn what_is_right_is_read_as_without_it() {
        assert_eq!(
            read(&valid()).unwrap(),
            serde_json::from_value(valid()).unwrap()
        );
        let mut none = valid();
        none["one"] = Value::Null;
        assert_eq!(read(&none).unwrap().one, None);
    }

    #[test]
    fn a_list_is_no_mapping_at_any_depth() {
        for place in ["/one", "/list/0", "/named/a"] {
            let mut wrong = valid();
            *wrong.pointer_mut(place).unwrap() = json!([1, "yes"]);
            assert!(serde_json::from_value::<Outer>(wrong.clone()).is_ok());
            let error = read(&wrong).unwrap_err().to_string();
            assert!(
                error.contains("a list, expected a mapping of its keys"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_has_another_type_or_length_is_refused() {
        for (place, value) in [
            ("/one/number", json!(-1)),
            ("/one/word", json!("no")),
            ("/list", json!({})),
            ("/named", json!([])),
            ("/pair", json!([1, 2, 3])),
            ("/pair/0", json!(65_536)),
        ] {
            let mut wrong = valid();
            *wrong.pointer_mut(place).unwrap() = value;
            assert!(read(&wrong).is_err(), "{place}");
        }
        for text in ["x", ""] {
            assert!(read(&json!(text)).is_err());
        }
    }
}
