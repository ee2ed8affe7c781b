//! Hides what commands and addresses should not have held: keys, tokens and passwords.
//!
//! A command is shown to whoever may look at the admin listener or read the log, and its arguments may hold keys. What is hidden
//! is told by its name (`--api-key`, `HF_TOKEN=`, `"password":`), by its place in a URL, or by how it begins. Rather too much is
//! hidden than too little.

use super::MASK;

/// Returns the words of a command as they may be shown.
pub(crate) fn command(words: &[String]) -> Vec<String> {
    let mut scan = Scan::default();
    words.iter().map(|word| scan.word(word)).collect()
}

/// Returns what [`command`] hides of these words.
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
    has(&SECRETS) || has(&["token"]) && !has(&NUMBERS)
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
    /// The word before was a flag whose value, or values, follow.
    is_value: bool,
}

impl Scan {
    fn word(&mut self, word: &str) -> String {
        let is_flag = word.starts_with("--");
        if std::mem::take(&mut self.is_value) && !is_flag && !word.is_empty() {
            // Some flags take several values.
            self.is_value = true;
            self.hidden.push(word.to_owned());
            return MASK.to_owned();
        }
        let mut shown = String::new();
        let mut rest = word;
        while let Some(first) = rest.chars().next() {
            if let Some(after) = rest.strip_prefix("://") {
                shown.push_str("://");
                rest = self.user(after, &mut shown);
                continue;
            }
            let name = &rest[..rest.find(|of| !is_of_name(of)).unwrap_or(rest.len())];
            if name.is_empty() {
                shown.push(first);
                rest = &rest[first.len_utf8()..];
                continue;
            }
            rest = &rest[name.len()..];
            let is_key = BEGINNINGS.iter().any(|begin| name.starts_with(begin));
            if is_key && name.len() >= SHORTEST_KEY {
                self.hide(name, &mut shown);
                continue;
            }
            shown.push_str(name);
            if is_secret_name(name) || name.eq_ignore_ascii_case("bearer") {
                rest = self.after_name(name, rest, &mut shown);
            }
        }
        shown
    }

    /// Hides who asks, in what follows the scheme of a URL.
    fn user<'a>(&mut self, rest: &'a str, shown: &mut String) -> &'a str {
        let end = rest.find(|of: char| of.is_whitespace() || "/?#\"'".contains(of));
        let authority = &rest[..end.unwrap_or(rest.len())];
        let Some((user, _)) = authority.rsplit_once('@') else {
            return rest;
        };
        let password = user.split_once(':').map_or(user, |(_, password)| password);
        self.hidden.push(password.to_owned());
        shown.push_str(MASK);
        &rest[user.len()..]
    }

    /// Hides the value, or values, of a name, where any follow.
    fn after_name<'a>(&mut self, name: &str, rest: &'a str, shown: &mut String) -> &'a str {
        let is_flag = name.starts_with('-');
        if rest.is_empty() {
            self.is_value = is_flag;
            return rest;
        }
        let bare = rest.trim_start_matches(['"', '\'', '\\', ' ', '\t']);
        if let Some(value) = bare.strip_prefix(['=', ':']) {
            let value = value.trim_start_matches([' ', '\t']);
            shown.push_str(&rest[..rest.len() - value.len()]);
            return self.value(value, shown);
        }
        let mut rest = rest;
        while is_flag || name.eq_ignore_ascii_case("bearer") {
            let value = rest.trim_start();
            let is_next = value.is_empty() || value.starts_with(['-', '&', '|', ';', '<', '>']);
            if value.len() == rest.len() || is_next {
                break;
            }
            shown.push_str(&rest[..rest.len() - value.len()]);
            rest = self.value(value, shown);
        }
        rest
    }

    /// Hides one value, which `rest` begins with.
    fn value<'a>(&mut self, rest: &'a str, shown: &mut String) -> &'a str {
        let bare = rest.trim_start_matches('\\');
        let close = match bare.chars().next() {
            Some('[') => Some(']'),
            Some('(') => Some(')'),
            Some(quote @ ('"' | '\'')) => Some(quote),
            _ => None,
        };
        let begin = if close.is_some() { &bare[1..] } else { rest };
        let opened = &rest[..rest.len() - begin.len()];
        let end = match close {
            Some(close) => begin.find(close),
            None => begin.find(|of: char| of.is_whitespace() || ",;&|)}]\"'".contains(of)),
        };
        let value = &begin[..end.unwrap_or(begin.len())];
        let rest = &begin[value.len()..];
        shown.push_str(opened);
        if close.is_none() && SCHEMES.iter().any(|of| value.eq_ignore_ascii_case(of)) {
            // The name of the scheme stands before the key itself.
            let key = rest.trim_start();
            shown.push_str(value);
            shown.push_str(&rest[..rest.len() - key.len()]);
            let end = key.find(|of: char| of.is_whitespace() || "\"'".contains(of));
            let (key, rest) = key.split_at(end.unwrap_or(key.len()));
            self.hide(key, shown);
            return rest;
        }
        self.hide(value, shown);
        rest
    }

    fn hide(&mut self, value: &str, shown: &mut String) {
        if value.is_empty() {
            return;
        }
        let quotes = ['"', '\'', '\\', ' ', ','];
        let single = value.split(quotes).filter(|part| !part.is_empty());
        self.hidden.extend(single.map(str::to_owned));
        shown.push_str(MASK);
    }
}

/// Nothing shorter is taken for a key by its beginning alone.
const SHORTEST_KEY: usize = 12;

/// Words that stand before a key in a header.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];

const fn is_of_name(of: char) -> bool {
    of.is_ascii_alphanumeric() || matches!(of, '_' | '-' | '.')
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
                &["x", "--api-key", "one1", "two2", "-v"],
                "x --api-key *** *** ***",
            ),
            (&["x", "--api-key=s3cret", "m"], "x --api-key=*** m"),
            (&["env", "HF_TOKEN=s3cret", "x"], "env HF_TOKEN=*** x"),
            (
                &[
                    "sh",
                    "-c",
                    "X_PASSWORD='s3 cret' vllm --api-key one two --port 1 && y",
                ],
                "sh -c X_PASSWORD='***' vllm --api-key *** *** --port 1 && y",
            ),
            (
                &["sh", "-c", "x --token s3cret; y"],
                "sh -c x --token ***; y",
            ),
            (
                &["x", r#"{"apiKey": "s3cret", "port": 5}"#],
                r#"x {"apiKey": "***", "port": 5}"#,
            ),
            (
                &["x", "{'api_key': ['one1', 'two2'], 'model': 'm'}"],
                "x {'api_key': [***], 'model': 'm'}",
            ),
            (
                &["curl", "-H", "Authorization: Bearer s3cret"],
                "curl -H Authorization: Bearer ***",
            ),
            (&["curl", "x: bearer s3cret y"], "curl x: bearer *** ***"),
            (
                &["x", "redis://me:s3cret@host:1/0"],
                "x redis://***@host:1/0",
            ),
            (&["x", "hf_0123456789abcdef"], "x ***"),
        ] {
            assert_eq!(shown(words), expected, "{words:?}");
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
            // Inside of a quote that another secret opened, all of it is hidden.
            assert!(
                !command(std::slice::from_ref(&flag))[0].contains("XYZZY"),
                "{flag}"
            );
            let words = [word, "--password".to_owned(), "XYZZY".to_owned()];
            assert!(!command(&words)[2].contains("XYZZY"), "{words:?}");
        }
    }
}
