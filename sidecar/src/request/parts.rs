//! Whether a body may be taken apart.

use memchr::{memchr_iter, memchr3_iter};

/// Tells whether parsing a body into values keeps within bounds. It takes many times the memory of the text: two bytes of it can
/// become a value of 32, and an entry of an object of some hundred.
pub(crate) fn has_few_parts(body: &[u8]) -> bool {
    // What stands within texts counts too: there is little of it.
    let values = memchr3_iter(b',', b'[', b'{', body).take(MOST + 1);
    let names = memchr_iter(b':', body).take(MOST + 1);
    values.count() + names.count() * 2 <= MOST
}

/// A prompt of a million token ids, and what else is in a body.
const MOST: usize = 1_100_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_have_few_parts_and_many_short_values_have_not() {
        let with = |part: &str, count: usize| format!("{{\"prompt\":[{}]}}", part.repeat(count));
        let text = "A sentence, and one more: so texts are. ";
        for (part, count) in [("151642,", 1_000_000), (text, 200_000)] {
            assert!(has_few_parts(with(part, count).as_bytes()), "{part}");
        }
        for (part, count) in [("1,", 1_200_000), ("[],", 600_000), ("{\"a\":1},", 300_000)] {
            assert!(!has_few_parts(with(part, count).as_bytes()), "{part}");
        }
    }
}
