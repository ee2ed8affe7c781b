//! Hides what commands and addresses should not have held: keys, tokens and passwords.
//!
//! A command is shown to whoever may look at the admin listener or read the log, and its arguments may hold keys. What is hidden
//! is told by its name (`--api-key`, `HF_TOKEN=`, `"password":`), by its place in a URL, or by how it begins. Rather too much is
//! hidden than too little:
//!
//! - After a flag, every word up to the next one that begins with `-`: some flags take several values.
//! - After `name=`, the rest of the word; after `name:`, as after a flag.
//! - In a word with spaces (`sh -c "..."`, a header) its parts are words. Where quotes, brackets or backslashes stand in it, nobody
//!   knows where a value ends: all the rest is hidden.

use super::MASK;

/// Returns the words of a command as they may be shown.
pub(crate) fn command(words: &[String]) -> Vec<String> {
    let mut scan = Scan::default();
    words.iter().map(|word| scan.word(word)).collect()
}

/// Returns the values that [`command`] hides of these words, as programs may write them down.
pub(crate) fn hidden(words: &[String]) -> Vec<String> {
    let mut scan = Scan::default();
    for word in words {
        scan.word(word);
    }
    scan.hidden
}

/// Tells whether a flag, a variable or a key of this name has a value that is not for everyone.
pub(crate) fn is_secret_name(name: &str) -> bool {
    let parts = parts(name);
    let has = |wanted: &[&str]| parts.iter().any(|part| wanted.contains(&part.as_str()));
    // `pass_config` is about passes.
    let ends_in_pass = parts.last().is_some_and(|part| part == "pass");
    ends_in_pass || has(&SECRETS) || has(&["token"]) && !has(&NUMBERS)
}

/// Parts of names that tell of a secret.
const SECRETS: [&str; 13] = [
    "key",
    "keys",
    "apikey",
    "apikeys",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "authorization",
];

/// Parts of names that tell of tokens of text.
const NUMBERS: [&str; 9] = [
    "id", "ids", "num", "max", "min", "limit", "count", "per", "budget",
];

/// Begins keys of well-known services.
const BEGINNINGS: [&str; 4] = ["hf_", "sk-", "ghp_", "nvapi-"];

/// Splits a name at its signs and before capitals that follow small letters, in small letters.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut was_small = false;
    for letter in name.chars() {
        if matches!(letter, '-' | '_' | '.') || letter.is_ascii_uppercase() && was_small {
            parts.push(String::new());
        }
        if letter.is_ascii_alphanumeric()
            && let Some(part) = parts.last_mut()
        {
            part.push(letter.to_ascii_lowercase());
        }
        was_small = letter.is_ascii_lowercase();
    }
    parts
}

/// Reads a command word by word.
#[derive(Default)]
struct Scan {
    hidden: Vec<String>,
    /// The word before was a flag or one of its values.
    is_value: bool,
}

impl Scan {
    fn word(&mut self, word: &str) -> String {
        self.is_value &= !word.starts_with('-');
        if self.is_value && !word.is_empty() {
            self.hide(word);
            return MASK.to_owned();
        }
        let is_plain = !word.contains(UNCLEAR);
        let mut is_shown = true;
        let mut shown = String::new();
        let mut rest = word;
        while let Some((before, after)) = self.secret(rest) {
            if is_shown {
                shown.push_str(before);
                shown.push_str(MASK);
            }
            // Where a URL's user ends is clear everywhere.
            is_shown &= is_plain || before.ends_with("://");
            rest = after;
        }
        if is_shown {
            shown.push_str(rest);
        }
        shown
    }

    /// Finds the next secret of a text; returns what stands before it and what comes after.
    fn secret<'a>(&mut self, text: &'a str) -> Option<(&'a str, &'a str)> {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let before = |value: &str| &text[..text.len() - value.len()];
            if let Some(after) = rest.strip_prefix("://")
                && let Some(user) = user(after)
            {
                self.hide(user.split_once(':').map_or(user, |(_, password)| password));
                return Some((before(after), &after[user.len()..]));
            }
            let name = &rest[..rest.find(|of| !is_of_name(of)).unwrap_or(rest.len())];
            if name.len() >= SHORTEST_KEY && BEGINNINGS.iter().any(|of| name.starts_with(of)) {
                return Some((before(rest), self.values(rest, true)));
            }
            rest = &rest[name.len().max(first.len_utf8())..];
            let is_bearer = name.eq_ignore_ascii_case("bearer");
            if !is_bearer && !is_secret_name(name) {
                continue;
            }
            let value = rest.trim_start_matches(['"', '\'', '\\']);
            let value = value.trim_start_matches(|of: char| of.is_whitespace() || of == ',');
            if let Some(signed) = value.strip_prefix(['=', ':']) {
                let signed = signed.trim_start();
                if !signed.is_empty() {
                    return Some((before(signed), self.values(signed, value.starts_with('='))));
                }
            } else if is_bearer || name.starts_with('-') {
                self.is_value = value.is_empty();
                if !value.is_empty() && value.len() < rest.len() && !value.starts_with(ENDS) {
                    return Some((before(value), self.values(value, false)));
                }
            }
        }
        None
    }

    /// Hides the value, or values, which a text begins with; returns what comes after.
    fn values<'a>(&mut self, text: &'a str, is_one: bool) -> &'a str {
        let mut next = text;
        loop {
            let (value, rest) = value(next);
            self.hide(value);
            next = rest.trim_start();
            let is_scheme = SCHEMES.iter().any(|of| value.eq_ignore_ascii_case(of));
            let is_member = value.ends_with(',') && next.starts_with(['"', '\'']);
            let is_last = is_one && !is_scheme || is_member || next.len() == rest.len();
            if is_last || next.is_empty() || next.starts_with(ENDS) {
                return rest;
            }
        }
    }

    fn hide(&mut self, value: &str) {
        let between =
            |of: char| of.is_whitespace() || UNCLEAR.contains(&of) || ",;])}".contains(of);
        let all = [value.to_owned(), value.replace('\\', "")];
        let all = all
            .into_iter()
            .chain(value.split(between).map(str::to_owned));
        let is_secret = |of: &String| !of.is_empty() && !SCHEMES.contains(&&*of.to_lowercase());
        self.hidden.extend(all.filter(is_secret));
    }
}

/// Where these stand, the end of a value is not clear.
const UNCLEAR: [char; 7] = ['"', '\'', '\\', '`', '(', '[', '{'];

/// Begin what is no value: flags and what shells know.
const ENDS: [char; 6] = ['-', '&', '|', ';', '<', '>'];

/// Nothing shorter is taken for a key by its beginning alone.
const SHORTEST_KEY: usize = 12;

/// Words that stand before a key in a header.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];

const fn is_of_name(of: char) -> bool {
    of.is_ascii_alphanumeric() || matches!(of, '_' | '-' | '.')
}

/// Returns who asks, in what follows the scheme of a URL.
fn user(text: &str) -> Option<&str> {
    let end = text.find(|of: char| of.is_whitespace() || "/?#".contains(of));
    let (user, _) = text[..end.unwrap_or(text.len())].rsplit_once('@')?;
    Some(user)
}

/// Splits the value off that a text begins with: what its quotes or brackets hold, or all up to the next space or quote.
fn value(text: &str) -> (&str, &str) {
    let bare = text.trim_start_matches('\\');
    let close = match bare.chars().next() {
        Some('[') => Some(']'),
        Some('(') => Some(')'),
        Some('{') => Some('}'),
        Some(quote @ ('"' | '\'')) => Some(quote),
        _ => None,
    };
    let inner = close.map_or(bare, |_| &bare[1..]);
    let are_quotes_escaped = bare.len() < text.len();
    let mut is_escaped = false;
    let ends = |of: char| {
        let is_end = match close {
            Some(close) => of == close,
            None => of.is_whitespace() || "\"'".contains(of),
        };
        let ends = is_end && (are_quotes_escaped || !is_escaped);
        is_escaped = of == '\\' && !is_escaped;
        ends
    };
    let end = inner.find(ends).unwrap_or(inner.len());
    let (value, rest) = inner.split_at(end);
    (
        value,
        close
            .and_then(|close| rest.strip_prefix(close))
            .unwrap_or(rest),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn shown(words: &[&str]) -> String {
        let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
        let shown = command(&words).join(" ");
        for secret in hidden(&words) {
            assert!(!shown.contains(&secret), "{secret} in {shown}");
        }
        shown
    }

    #[test]
    fn values_of_secret_names_are_hidden_wherever_they_stand() {
        for (words, expected) in [
            (
                &["vllm", "--api-key", "s3cret", "--port", "80"][..],
                "vllm --api-key *** --port 80",
            ),
            (
                &["x", "--api-key", "one1", "two2", "-v", "model"],
                "x --api-key *** *** -v model",
            ),
            (
                &["x", "--password=ab12,cd34;ef&g|h)}]", "m"],
                "x --password=*** m",
            ),
            (&["x", r#"--password="ab12\"cd34""#], "x --password=***"),
            (
                &["x", r#"{"key": "ab12\"cd34", "a": 1}"#],
                r#"x {"key": ***"#,
            ),
            (&["x", "--api-key=s3cret", "m"], "x --api-key=*** m"),
            (
                &["env", "HF_TOKEN=s3cret", "DB_PASS=s3cret", "x"],
                "env HF_TOKEN=*** DB_PASS=*** x",
            ),
            (
                &[
                    "sh",
                    "-c",
                    "HF_TOKEN=s3cret vllm serve m --api-key one1 two2 --port 1",
                ],
                "sh -c HF_TOKEN=*** vllm serve m --api-key *** --port 1",
            ),
            (
                &["sh", "-c", "vllm --port 1 X_PASSWORD='s3 -cret' vllm m"],
                "sh -c vllm --port 1 X_PASSWORD=***",
            ),
            (
                &["sh", "-c", "x \"password=one1 two2\" y"],
                "sh -c x \"password=***",
            ),
            (&["sh", "-c", "x --token s3cret; y"], "sh -c x --token ***"),
            (
                &["sh", "-c", "x --token s3cret && y"],
                "sh -c x --token *** && y",
            ),
            (
                &["x", "{'api_key': ['one1', 'two2'], 'model': 'm'}"],
                "x {'api_key': ***",
            ),
            (
                &["curl", "-H", "Authorization: Bearer s3cret"],
                "curl -H Authorization: ***",
            ),
            (
                &["x", "authorization=Basic s3cret m"],
                "x authorization=*** m",
            ),
            (&["curl", "x: bearer s3cret"], "curl x: bearer ***"),
            (&["x", "bearer", "s3cret", ""], "x bearer *** "),
            (
                &["x", "redis://me:s3cret@host:1/0"],
                "x redis://***@host:1/0",
            ),
            (
                &["x", r#"{"at": "redis://me:s3'cret@host:1/0", "a": 1}"#],
                r#"x {"at": "redis://***@host:1/0", "a": 1}"#,
            ),
            (&["x", "hf_0123456789abcdef", "m"], "x *** m"),
        ] {
            assert_eq!(shown(words), expected, "{words:?}");
        }
    }

    /// What is replaced in logs is the values alone, not all that a command does not show.
    #[test]
    fn values_are_told_apart_from_what_follows_them() {
        for (word, expected) in [
            ("A_KEY='s3 cret4' vllm m1234", &["cret4", "s3 cret4"][..]),
            (
                r#"{"key": "ab12\"cd34", "a": 1}"#,
                &["ab12", r#"ab12"cd34"#, r#"ab12\"cd34"#, "cd34"],
            ),
            (r#"{\"key\": \"ab12\", \"model\": 1}"#, &["ab12", r"ab12\"]),
            (
                r#"{"keys": ["one1", "two2"], "model": "m1234"}"#,
                &[r#""one1", "two2""#, "one1", "two2"],
            ),
            ("--api-key one1 'two2' --port \"8000\"", &["one1", "two2"]),
            ("--api-key=one1,two2", &["one1", "one1,two2", "two2"]),
            ("Authorization: Bearer s3cret", &["s3cret"]),
            (r#"{"key": null, "model": "m1234"}"#, &["null", "null,"]),
            ("A_KEY='a' B_KEY=\"s3cret\" vllm", &["s3cret"]),
        ] {
            let found = hidden(&[word.to_owned()]).into_iter();
            let found: BTreeSet<_> = found.filter(|value| value.len() >= 4).collect();
            assert_eq!(found.iter().collect::<Vec<_>>(), expected, "{word}");
        }
    }

    #[test]
    fn what_is_no_secret_is_shown() {
        for words in [
            &[
                "vllm",
                "serve",
                "Qwen/Qwen3-8B",
                "--max-num-batched-tokens",
                "8192",
                "--enable-prompt-tokens-details",
            ][..],
            &[
                "--tokenizer",
                "x",
                "--ssl-keyfile",
                "/a.pem",
                "--eos-token-id",
                "5",
                "--max-token=4",
            ],
            &[
                "--kv-events-config",
                r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}"#,
                r#"{"pass_config": {"fuse_norm_quant": true}}"#,
            ],
            &[
                "http://127.0.0.1:80/x?a=b@c",
                "sk-1",
                "--is-secret",
                "--port",
                "80",
            ],
            &["", "é=ü", "://", "--api-key="],
        ] {
            assert_eq!(shown(words), words.join(" "));
        }
    }

    /// Pieces of everything that the scanner looks at, in random order, must neither panic nor show a secret.
    #[test]
    fn no_order_of_pieces_breaks_it_or_lets_a_named_secret_through() {
        let pieces = [
            "--api-key",
            "=",
            ":",
            " ",
            "\"",
            "'",
            "[",
            "]",
            "\\",
            "://",
            "@",
            "é",
            "bearer ",
            "Basic",
            ",",
            "{",
            "token",
            "hf_",
        ];
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..20_000 {
            let mut word = String::new();
            for _ in 0..random.usize(..12) {
                word.push_str(pieces[random.usize(..pieces.len())]);
            }
            let flag = format!("{word} --password=XYZZYXYZZY");
            // Where another secret stands before it, all of it may be hidden.
            assert!(
                !command(std::slice::from_ref(&flag))[0].contains("XYZZY"),
                "{flag}"
            );
            let words = [word, "--password".to_owned(), "XYZZY".to_owned()];
            assert!(!command(&words)[2].contains("XYZZY"), "{words:?}");
        }
    }
}
