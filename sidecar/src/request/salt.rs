//! Writing a trusted cache salt into a body, leaving every other byte as it is.

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::value::RawValue;

use super::fields::Fields;

/// Returns the body with `salt` as its `cache_salt`; `None` when it already is.
pub(super) fn write(body: &[u8], fields: &Fields<'_>, salt: &str) -> Option<Bytes> {
    let value = serde_json::to_string(salt).ok()?;
    let same = |raw: &&RawValue| raw.get() == value;
    if !fields.cache_salts.is_empty() && fields.cache_salts.iter().all(same) {
        return None;
    }
    let mut out = BytesMut::with_capacity(body.len() + value.len() + 16);
    if fields.cache_salts.is_empty() {
        let open = memchr::memchr(b'{', body)? + 1;
        out.put_slice(&body[..open]);
        out.put_slice(b"\"cache_salt\":");
        out.put_slice(value.as_bytes());
        if fields.has_fields {
            out.put_u8(b',');
        }
        out.put_slice(&body[open..]);
        return Some(out.freeze());
    }
    let mut copied = 0;
    for raw in &fields.cache_salts {
        let start = offset_in(body, raw)?;
        out.put_slice(&body[copied..start]);
        out.put_slice(value.as_bytes());
        copied = start + raw.get().len();
    }
    out.put_slice(&body[copied..]);
    Some(out.freeze())
}

/// Position of a value that was borrowed from the body.
fn offset_in(body: &[u8], raw: &RawValue) -> Option<usize> {
    let start = (raw.get().as_ptr() as usize).checked_sub(body.as_ptr() as usize)?;
    (start + raw.get().len() <= body.len()).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(body: &str) -> String {
        let fields: Fields<'_> = serde_json::from_str(body).unwrap();
        let out = write(body.as_bytes(), &fields, "t\"1");
        out.map_or_else(
            || "same".to_owned(),
            |out| String::from_utf8(out.to_vec()).unwrap(),
        )
    }

    #[test]
    fn only_the_salt_changes() {
        let cases = [
            ("{}", r#"{"cache_salt":"t\"1"}"#),
            (" { \"a\" :1}", r#" {"cache_salt":"t\"1", "a" :1}"#),
            (
                r#"{"a":1,"cache_salt" : "x","b":2}"#,
                r#"{"a":1,"cache_salt" : "t\"1","b":2}"#,
            ),
            (
                r#"{"cache_salt":null,"cache_salt":"y"}"#,
                r#"{"cache_salt":"t\"1","cache_salt":"t\"1"}"#,
            ),
            (
                r#"{"cache\u005fsalt":"x"}"#,
                r#"{"cache\u005fsalt":"t\"1"}"#,
            ),
            (r#"{"cache_salt":"t\"1"}"#, "same"),
        ];
        for (body, expected) in cases {
            assert_eq!(written(body), expected, "{body}");
        }
    }
}
