//! A built-in word tokenizer and chat template, so that the engine needs no model files.
//!
//! Words are separated by white space. `w<N>` is token N (no leading zeros, N below the vocabulary); any other word is
//! cut into pieces of at most 12 characters, each hashed to one id. Tokens are written as `w<N>`, so what the engine
//! generates reads back as the same tokens, while an ordinary word reads back as another spelling of its id.
//! Appending text to a prompt changes no token before its last word.

use xxhash_rust::xxh3::xxh3_64;

/// A deterministic tokenizer; equal vocabularies give equal tokens in every process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokenizer {
    vocabulary: u32,
}

/// One chat message, as text.
#[derive(Clone, Debug)]
pub(super) struct ChatMessage {
    pub(super) role: String,
    pub(super) content: String,
}

/// Ids below this are padding, start and end in many tokenizers; no word is hashed to them.
const FIRST_WORD: u32 = 3;

/// Ids at the top of the vocabulary that the chat template uses.
const TEMPLATE_TOKENS: u32 = 8;

const PIECE_CHARACTERS: usize = 12;

impl Tokenizer {
    /// Creates a tokenizer over `vocabulary` ids (at least 64, checked by the configuration).
    pub(super) const fn new(vocabulary: u32) -> Self {
        Self { vocabulary }
    }

    /// Returns the number of ids.
    pub(super) const fn vocabulary(self) -> u32 {
        self.vocabulary
    }

    /// Returns the tokens of a text.
    pub(super) fn encode(self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        for word in text.split_whitespace() {
            self.encode_word(word, &mut tokens);
        }
        tokens
    }

    /// Returns the tokens of a conversation: for each message a token of its role, its words and an end token, and at
    /// last the assistant's token when an answer is to follow. Tools come first, as their JSON text.
    pub(super) fn encode_chat(
        self,
        messages: &[ChatMessage],
        tools: Option<&str>,
        answer: bool,
    ) -> Vec<u32> {
        let mut tokens = Vec::new();
        if let Some(tools) = tools {
            self.encode_turn("tools", tools, &mut tokens);
        }
        for message in messages {
            self.encode_turn(&message.role, &message.content, &mut tokens);
        }
        if answer {
            tokens.push(self.role_token("assistant"));
        }
        tokens
    }

    /// Returns the text of one token.
    pub(super) fn decode(self, token: u32) -> String {
        format!("w{token}")
    }

    /// Maps any number to the id of an ordinary word.
    pub(super) fn word(self, number: u64) -> u32 {
        let words = u64::from(self.vocabulary - TEMPLATE_TOKENS - FIRST_WORD);
        FIRST_WORD + u32::try_from(number % words).unwrap_or(0)
    }

    fn encode_turn(self, role: &str, content: &str, tokens: &mut Vec<u32>) {
        tokens.push(self.role_token(role));
        tokens.extend(self.encode(content));
        tokens.push(self.vocabulary - TEMPLATE_TOKENS);
    }

    fn role_token(self, role: &str) -> u32 {
        let place = match role {
            "system" | "developer" => 1,
            "user" => 2,
            "assistant" => 3,
            "tool" => 4,
            "tools" => 5,
            _ => 6,
        };
        self.vocabulary - TEMPLATE_TOKENS + place
    }

    fn encode_word(self, word: &str, tokens: &mut Vec<u32>) {
        if let Some(token) = self.numbered(word) {
            tokens.push(token);
            return;
        }
        let mut rest = word;
        while !rest.is_empty() {
            let end = rest
                .char_indices()
                .nth(PIECE_CHARACTERS)
                .map_or(rest.len(), |(at, _)| at);
            let (piece, tail) = rest.split_at(end);
            tokens.push(self.word(xxh3_64(piece.as_bytes())));
            rest = tail;
        }
    }

    fn numbered(self, word: &str) -> Option<u32> {
        let digits = word.strip_prefix('w')?;
        let canonical = digits.bytes().all(|byte| byte.is_ascii_digit())
            && (digits == "0" || !digits.starts_with('0'));
        let token: u32 = digits.parse().ok()?;
        (canonical && token < self.vocabulary).then_some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: Tokenizer = Tokenizer::new(1024);

    #[test]
    fn numbered_words_are_their_token() {
        assert_eq!(TOKENIZER.encode(" w3  w1023\nw0 "), [3, 1023, 0]);
        for word in ["w1024", "w007", "w+5", "w", "W3", "w99999999999"] {
            let tokens = TOKENIZER.encode(word);
            assert_eq!(tokens.len(), 1, "{word}");
            assert!((3..1016).contains(&tokens[0]), "{word}");
        }
    }

    #[test]
    fn generated_words_read_back_as_themselves() {
        let text: Vec<String> = (0..1024).map(|token| TOKENIZER.decode(token)).collect();
        assert_eq!(
            TOKENIZER.encode(&text.join(" ")),
            (0..1024).collect::<Vec<_>>()
        );
    }

    #[test]
    fn long_words_are_cut_between_characters() {
        // 30 characters of 2 bytes: pieces of 12, 12 and 6.
        let word = "ü".repeat(30);
        let tokens = TOKENIZER.encode(&word);
        assert_eq!(tokens.len(), 3);
        assert_eq!(tokens[0], tokens[1]);
    }

    #[test]
    fn a_conversation_extends_its_own_past() {
        let message = |role: &str, content: &str| ChatMessage {
            role: role.to_owned(),
            content: content.to_owned(),
        };
        let mut messages = vec![message("system", "be w5"), message("user", "w6 w7")];
        let mut first = TOKENIZER.encode_chat(&messages, None, true);
        first.extend([8, 9]); // generated
        messages.extend([message("assistant", "w8 w9"), message("user", "w10")]);
        let second = TOKENIZER.encode_chat(&messages, None, true);
        assert_eq!(second[..first.len()], first);
    }
}
