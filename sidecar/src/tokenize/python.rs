//! The corners of Python that chat templates show: `json.dumps`, `repr` of a float, and string methods.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// The `tojson` filter as transformers defines it: `json.dumps(x, ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`, without HTML escaping.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the form in which minijinja hands keyword arguments over"
)]
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = args.0.into_iter();
    let mut argument = |name: &str| -> Result<Option<Value>, Error> {
        let given = match args.next() {
            Some(value) => Some(value),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(given.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let ensure_ascii = argument("ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = argument("indent")?
        .map(|value| indentation(&value))
        .transpose()?;
    let separators = argument("separators")?
        .map(|value| separators(&value))
        .transpose()?;
    let sort_keys = argument("sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    if args.next().is_some() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let (item, key) = separators.unwrap_or_else(|| {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_owned(), ": ".to_owned())
    });
    let mut dump = Dump {
        out: String::new(),
        ensure_ascii,
        indent,
        item,
        key,
        sort_keys,
        depth: 0,
    };
    dump.value(value)?;
    Ok(Value::from(dump.out))
}

/// Formats a float as Python's `repr` does: the shortest digits, an exponent from 1e16 up and below 1e-4.
pub(super) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..16).contains(&exponent) || value == 0.0 {
        let plain = format!("{value}");
        return if plain.contains('.') {
            plain
        } else {
            plain + ".0"
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

/// Adds the string methods of Python that minijinja's own collection lacks, then falls back to that collection.
pub(super) fn unknown_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match method {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            "partition" => {
                let (separator,): (&str,) = from_args(args)?;
                let (head, tail) = match text.split_once(separator) {
                    Some((head, tail)) => ([head, separator], tail),
                    None => ([text, ""], ""),
                };
                return Ok([head[0], head[1], tail]
                    .into_iter()
                    .map(Value::from)
                    .collect());
            }
            "rpartition" => {
                let (separator,): (&str,) = from_args(args)?;
                let parts = match text.rsplit_once(separator) {
                    Some((head, tail)) => [head, separator, tail],
                    None => ["", "", text],
                };
                return Ok(parts.into_iter().map(Value::from).collect());
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// `is sequence` as Jinja2 has it: whatever has a length and can be indexed, strings and mappings included.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::String | ValueKind::Bytes | ValueKind::Seq | ValueKind::Map
    )
}

/// `is iterable` as Jinja2 has it: `None` is not.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// `is number` as Jinja2 has it: a boolean is one.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

fn indentation(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    // Longer than any template needs, and short enough that a deep value stays small.
    const MAX_SPACES: i64 = 64;
    match value.as_i64() {
        Some(spaces @ ..=MAX_SPACES) => Ok(" ".repeat(usize::try_from(spaces).unwrap_or_default())),
        _ => Err(invalid(format!(
            "indent must be text or at most {MAX_SPACES} spaces, not {value}"
        ))),
    }
}

fn separators(value: &Value) -> Result<(String, String), Error> {
    let parts: Vec<Value> = value.try_iter()?.take(3).collect();
    match parts.as_slice() {
        [item, key] => match (item.as_str(), key.as_str()) {
            (Some(item), Some(key)) => Ok((item.to_owned(), key.to_owned())),
            _ => Err(invalid("separators must be two texts".to_owned())),
        },
        _ => Err(invalid("separators must be two texts".to_owned())),
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// A running `json.dumps`.
struct Dump {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
    depth: usize,
}

/// Deepest nesting that is written; Python's own limit is near.
const MAX_DEPTH: usize = 200;

impl Dump {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value)?,
            ValueKind::Map => self.map(value)?,
            kind => {
                return Err(invalid(format!(
                    "a value of type {kind} is not JSON serializable"
                )));
            }
        }
        Ok(())
    }

    fn list(&mut self, value: &Value) -> Result<(), Error> {
        self.open('[')?;
        let mut first = true;
        for item in value.try_iter()? {
            self.separate(&mut first);
            self.value(&item)?;
        }
        self.close(']', first);
        Ok(())
    }

    fn map(&mut self, value: &Value) -> Result<(), Error> {
        self.open('{')?;
        let mut pairs = Vec::with_capacity(value.len().unwrap_or_default());
        for key in value.try_iter()? {
            let text = match key.kind() {
                ValueKind::None => "null".to_owned(),
                ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
                ValueKind::Number => number(&key),
                _ => key.to_string(),
            };
            pairs.push((text, value.get_item(&key)?));
        }
        if self.sort_keys {
            pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        let mut first = true;
        for (key, item) in pairs {
            self.separate(&mut first);
            self.text(&key);
            self.out.push_str(&self.key);
            self.value(&item)?;
        }
        self.close('}', first);
        Ok(())
    }

    fn open(&mut self, bracket: char) -> Result<(), Error> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(invalid(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        self.out.push(bracket);
        Ok(())
    }

    fn separate(&mut self, first: &mut bool) {
        if !std::mem::take(first) {
            self.out.push_str(&self.item);
        }
        self.line();
    }

    fn close(&mut self, bracket: char, empty: bool) {
        self.depth -= 1;
        if !empty {
            self.line();
        }
        self.out.push(bracket);
    }

    fn line(&mut self) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..self.depth {
                self.out.push_str(indent);
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..='\u{1f}' => self.escape(character),
                _ if self.ensure_ascii && !character.is_ascii() => self.escape(character),
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a String cannot fail.
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

/// Formats a number as Python does: integers as they are, floats by `repr` with JSON's names for the odd ones.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) if float.is_nan() => "NaN".to_owned(),
        Ok(float) if float.is_infinite() => {
            if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
        }
        Ok(float) => float_repr(float),
        Err(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_read_as_python_writes_them() {
        // Left: the value; right: what `repr` prints in CPython 3.11.
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (0.7, "0.7"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (1e100, "1e+100"),
        ];
        for (value, expected) in cases {
            assert_eq!(float_repr(value), expected);
        }
    }
}
