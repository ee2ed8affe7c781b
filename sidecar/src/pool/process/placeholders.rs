//! Placeholders such as `{port}` in commands and environments.
//!
//! Commands hold JSON, whose braces must stay: only a name in lower case between braces is a placeholder, and one that is
//! not known is refused.

/// The placeholders there are.
pub(crate) const NAMES: [&str; 8] = [
    "port",
    "events_port",
    "replay_port",
    "side_channel_port",
    "gpus",
    "model",
    "name",
    "index",
];

/// Lists the placeholders in a text.
///
/// # Errors
/// Names one that is not known.
pub(crate) fn find(text: &str) -> Result<Vec<&'static str>, String> {
    split(text)
        .filter_map(|piece| match piece {
            Piece::Name(name) => Some(name),
            Piece::Text(_) => None,
        })
        .map(|name| {
            let known = NAMES.into_iter().find(|known| *known == name);
            known.ok_or_else(|| {
                format!(
                    "{{{name}}} is no placeholder; accepted: {}",
                    NAMES.map(|name| format!("{{{name}}}")).join(", ")
                )
            })
        })
        .collect()
}

/// Replaces the placeholders in a text by their values; one without a value stays.
pub(crate) fn replace(text: &str, value: impl Fn(&str) -> Option<String>) -> String {
    split(text)
        .map(|piece| match piece {
            Piece::Text(text) => text.to_owned(),
            Piece::Name(name) => value(name).unwrap_or_else(|| format!("{{{name}}}")),
        })
        .collect()
}

enum Piece<'a> {
    Text(&'a str),
    /// What stands between the braces.
    Name(&'a str),
}

fn split(text: &str) -> impl Iterator<Item = Piece<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some((begin, end)) = first(rest) else {
            return Some(Piece::Text(std::mem::take(&mut rest)));
        };
        if begin > 0 {
            let (text, tail) = rest.split_at(begin);
            rest = tail;
            return Some(Piece::Text(text));
        }
        let name = &rest[1..end - 1];
        rest = &rest[end..];
        Some(Piece::Name(name))
    })
}

/// Finds where the first placeholder begins and ends, braces included.
fn first(text: &str) -> Option<(usize, usize)> {
    text.match_indices('{').find_map(|(begin, _)| {
        let inner = &text[begin + 1..];
        let length = inner.find(|letter: char| !letter.is_ascii_lowercase() && letter != '_')?;
        (length > 0 && inner[length..].starts_with('}')).then_some((begin, begin + length + 2))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_replaced_and_other_braces_stay() {
        let value = |name: &str| (name == "port").then(|| "8000".to_owned());
        for (text, expected) in [
            ("{port}", "8000"),
            ("tcp://*:{port}/", "tcp://*:8000/"),
            (
                r#"{"a":{port},"b":{"c":"{port}"}}"#,
                r#"{"a":8000,"b":{"c":"8000"}}"#,
            ),
            ("{{port}}", "{8000}"),
            ("{}{ port}{PORT}{1}{", "{}{ port}{PORT}{1}{"),
            ("{index}ü{port}", "{index}ü8000"),
            ("", ""),
        ] {
            assert_eq!(replace(text, value), expected);
        }
    }

    #[test]
    fn unknown_placeholders_are_named() {
        assert_eq!(
            find("{port} {index} {port}").unwrap(),
            ["port", "index", "port"]
        );
        let error = find("{prot}").unwrap_err();
        assert!(
            error.contains("{prot}") && error.contains("{port}"),
            "{error}"
        );
    }
}
