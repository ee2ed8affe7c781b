//! Handoff fields that a client must not send: an incomplete one stops an engine, a stale one gives wrong text.

use memchr::memmem;

use super::fields::Fields;

/// Tells whether a field belongs to the handoff between prefill and decode.
pub(crate) fn is_handoff(key: &str) -> bool {
    key == "kv_transfer_params" || key == "ec_transfer_params" || key.starts_with("bootstrap_")
}

/// Names a handoff field of a body, also one inside the fields that engines hand on to their connectors.
pub(super) fn handoff_field(fields: &Fields<'_>) -> Option<String> {
    let nested = || {
        fields
            .containers
            .iter()
            .find_map(|raw| mentioned_in(raw.get().as_bytes()))
    };
    fields.handoff.clone().or_else(nested)
}

/// Names a handoff field that a body mentions, however it is escaped.
///
/// For bodies that cannot be read here but might be by an engine with another parser: UTF-16, NaN, deep nesting. The
/// engine refuses nearly all of them; one that also mentions such a field is refused here.
pub(super) fn mentioned_in(body: &[u8]) -> Option<String> {
    let plain = unescaped(body);
    ["kv_transfer_params", "ec_transfer_params", "bootstrap_"]
        .into_iter()
        .find(|name| memmem::find(&plain, name.as_bytes()).is_some())
        .map(str::to_owned)
}

/// Tells whether an engine may read an object out of a body that does not begin as one in UTF-8: Python's parser takes
/// UTF-8 after a byte order mark, UTF-16 and UTF-32 as well.
pub(super) fn may_hold_object(body: &[u8]) -> bool {
    let marks: [&[u8]; 3] = [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"];
    body.trim_ascii_start().starts_with(b"{")
        || marks.iter().any(|mark| body.starts_with(mark))
        || body.iter().take(2).any(|byte| *byte == 0)
}

/// Tells whether a body that cannot be read here mentions a field, however it is escaped.
pub(super) fn mentions(body: &[u8], field: &str) -> bool {
    memmem::find(&unescaped(body), field.as_bytes()).is_some()
}

/// Undoes `\u00XX` and drops the zero bytes of UTF-16 and UTF-32.
fn unescaped(body: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(body.len());
    let mut rest = body;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte == 0 {
            continue;
        }
        plain.push(byte);
        if let Some(start) = plain.len().checked_sub(6)
            && plain[start..].starts_with(b"\\u00")
            && let Some(code) = hex(plain[start + 4]).zip(hex(plain[start + 5]))
        {
            plain.truncate(start);
            plain.push(code.0 << 4 | code.1);
        }
    }
    plain
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit)
        .to_digit(16)
        .and_then(|value| u8::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_however_they_are_written() {
        let utf16: Vec<u8> = "{\"kv_transfer_params\":{}}"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect();
        let bodies: [&[u8]; 4] = [
            b"{\"kv_transfer_params\":NaN}",
            b"{\"kv\\u005ftransfer\\u005Fparams\":NaN}",
            b"{\"bootstrap_host\":",
            &utf16,
        ];
        for body in bodies {
            assert!(
                mentioned_in(body).is_some(),
                "{}",
                String::from_utf8_lossy(body)
            );
        }
        assert_eq!(mentioned_in(b"{\"prompt\": \"transfer\""), None);
    }

    #[test]
    fn an_object_is_suspected_in_every_encoding_that_engines_read() {
        let text = "{\"a\":1}";
        let wide = |big: bool| -> Vec<u8> {
            let unit = |unit: u16| {
                if big {
                    unit.to_be_bytes()
                } else {
                    unit.to_le_bytes()
                }
            };
            text.encode_utf16().flat_map(unit).collect()
        };
        let marked = |mark: &[u8], body: Vec<u8>| [mark, &body].concat();
        for body in [
            text.as_bytes().to_vec(),
            marked(b"\xef\xbb\xbf", text.into()),
            marked(b"\xff\xfe", wide(false)),
            marked(b"\xfe\xff", wide(true)),
            wide(false),
            wide(true),
            marked(b"\0\0", wide(true)),
        ] {
            assert!(may_hold_object(&body), "{body:?}");
        }
        for body in [&b""[..], b"--boundary\r\n\r\nbootstrap_x", b"[1]", b"\"x\""] {
            assert!(!may_hold_object(body), "{body:?}");
        }
    }
}
