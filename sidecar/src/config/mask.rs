//! Hides what commands and addresses should not have held: keys, tokens and passwords.
//!
//! A command is shown to whoever may look at the admin listener or read the log, and its arguments may hold keys. What is hidden
//! is told by its name (`--api-key`, `HF_TOKEN=`, `"password":`), by its place in a URL, or by how it begins. Rather too much is
//! hidden than too little: after such a name all the rest of its word, and after a flag that ends its word every word up to
//! the next one that begins with `-`, since some flags take several values.

use super::MASK;

/// Returns the words of a command as they may be shown.
pub(crate) fn command(words: &[String]) -> Vec<String> {
    let mut scan = Scan::default();
    words.iter().map(|word| scan.word(word)).collect()
}

/// Returns what is to be hidden in all that the program of these words writes: the values, and whatever else stands in the
/// hidden rest of a word and is long enough to be one.
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
        let word = self.without_user(word);
        let Some((before, mut value)) = secret(&word) else {
            return word;
        };
        self.is_value = value.is_empty();
        if self.is_value {
            return word;
        }
        let shown = format!("{before}{MASK}");
        self.hide(value);
        // Others in the rest.
        while let Some((_, next)) = secret(value).filter(|(before, _)| !before.is_empty()) {
            self.hide(next);
            value = next;
        }
        shown
    }

    /// Hides who asks, in each URL of a word.
    fn without_user(&mut self, word: &str) -> String {
        let mut parts = word.split("://");
        let mut shown = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            shown.push_str("://");
            let end = part.find(|of: char| of.is_whitespace() || "/?#".contains(of));
            let user = part[..end.unwrap_or(part.len())].rsplit_once('@');
            let rest = user.map_or(part, |(user, _)| {
                self.hide(user.split_once(':').map_or(user, |(_, password)| password));
                shown.push_str(MASK);
                &part[user.len()..]
            });
            shown.push_str(rest);
        }
        shown
    }

    fn hide(&mut self, value: &str) {
        let value = value.trim_start_matches('\\');
        let first = match value.chars().next() {
            Some(quote @ ('"' | '\'')) => value[1..].split(quote).next(),
            _ => value.split(is_sign).find(|part| !is_scheme(part)),
        };
        let others = value.split(is_sign).filter(|part| {
            part.len() >= SHORTEST_KEY && !part.starts_with('-') && !is_scheme(part)
        });
        let all = [value].into_iter().chain(first).chain(others);
        let all = all.map(|part| part.trim_end_matches('\\'));
        self.hidden
            .extend(all.filter(|part| !part.is_empty()).map(str::to_owned));
    }
}

/// Finds the first secret of a text; returns what stands before its value, and all that follows. Nothing follows the flag of
/// which the next words are the values.
fn secret(text: &str) -> Option<(&str, &str)> {
    let mut rest = text;
    while let Some(start) = rest.find(is_of_name) {
        let named = &rest[start..];
        let end = named.find(|of| !is_of_name(of)).unwrap_or(named.len());
        let (name, after) = named.split_at(end);
        rest = after;
        if name.len() >= SHORTEST_KEY && BEGINNINGS.iter().any(|of| name.starts_with(of)) {
            return Some(text.split_at(text.len() - named.len()));
        }
        let is_bearer = name.eq_ignore_ascii_case("bearer");
        if !is_bearer && !is_secret_name(name) {
            continue;
        }
        let value =
            after.trim_start_matches(|of: char| of.is_whitespace() || "\"'\\,".contains(of));
        let value = match value.strip_prefix(['=', ':']).map(str::trim_start) {
            Some("") => continue,
            Some(value) => value,
            // What follows a flag may be the next one, or what shells know.
            None if value.starts_with(['-', '&', '|', ';', '<', '>']) => continue,
            None if is_bearer || name.starts_with('-') => value,
            None => continue,
        };
        return Some(text.split_at(text.len() - value.len()));
    }
    None
}

/// Nothing shorter is taken for a secret by its looks alone.
const SHORTEST_KEY: usize = 12;

/// Tells whether a word stands before a key in a header, or is nothing.
fn is_scheme(word: &str) -> bool {
    let schemes = ["", "bearer", "basic", "token"];
    schemes.iter().any(|of| word.eq_ignore_ascii_case(of))
}

const fn is_of_name(of: char) -> bool {
    of.is_ascii_alphanumeric() || matches!(of, '_' | '-' | '.')
}

/// Tells whether a sign stands between values.
fn is_sign(of: char) -> bool {
    of.is_whitespace() || "\"'\\`()[]{},;&|<>".contains(of)
}

#[cfg(test)]
mod tests {
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
                "sh -c HF_TOKEN=***",
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
                "sh -c x --token ***",
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
                "x authorization=***",
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

    /// What is replaced in logs is the values, and not all that a command does not show.
    #[test]
    fn values_are_told_apart_from_what_follows_them() {
        for (word, secrets) in [
            ("A_KEY='s3 cret4' vllm m1234", &["s3 cret4"][..]),
            (r#"{\"key\": \"ab12\", \"model\": 1}"#, &["ab12"]),
            (
                r#"{"keys": ["one1", "a-longer-secret"], "model": "m1234"}"#,
                &["one1", "a-longer-secret"],
            ),
            (
                "--api-key one1 --port \"8000\" --token 'two2'",
                &["one1", "two2"],
            ),
            (
                "--api-key=one1,a-longer-secret",
                &["one1", "a-longer-secret"],
            ),
            ("Authorization: Bearer s3cret", &["s3cret"]),
            ("A_KEY='a' B_KEY=\"s3cret\" vllm", &["s3cret"]),
            ("hf_0123456789abcdef m1234", &["hf_0123456789abcdef"]),
        ] {
            let found = hidden(&[word.to_owned()]);
            for secret in secrets {
                assert!(
                    found.iter().any(|found| found == secret),
                    "{word}: {found:?}"
                );
            }
            for common in ["vllm", "m1234", "model", "--port", "8000", "Bearer"] {
                assert!(
                    !found.iter().any(|found| found == common),
                    "{word}: {found:?}"
                );
            }
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
