//! XXH3-64 of inputs of exactly 64 bytes: a block of 16 tokens, a full chunk of text.
//!
//! The general function asks for the length, the seed and the secret anew for each block. With all of them fixed, a block is
//! four multiplications to 128 bits and one of 64, and blocks overlap in the processor.
//!
//! # Source
//! The XXH3 algorithm's description (`doc/xxhash_spec.md` of github.com/Cyan4973/xxHash, "medium inputs"): length 17 to 128.

/// XXH3-64 with a given seed, for 64 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fixed64 {
    /// Words of the secret that meet words of the input, with the seed folded in; in the order of the input.
    keys: [u64; 8],
}

impl Fixed64 {
    pub(super) const fn new(seed: u64) -> Self {
        // Input bytes 0, 16, 32 and 48 meet secret bytes 0, 32, 48 and 16.
        let order = [0, 1, 4, 5, 6, 7, 2, 3];
        let mut keys = [0; 8];
        let mut word = 0;
        while word < 8 {
            let secret = u64::from_le_bytes(SECRET[order[word]]);
            keys[word] = if word % 2 == 0 {
                secret.wrapping_add(seed)
            } else {
                secret.wrapping_sub(seed)
            };
            word += 1;
        }
        Self { keys }
    }

    /// Hashes 16 words as if each were four little-endian bytes.
    #[inline]
    pub(super) fn hash_words(self, words: &[u32; 16]) -> u64 {
        self.hash(|at| u64::from(words[2 * at]) | u64::from(words[2 * at + 1]) << 32)
    }

    /// Hashes 64 bytes.
    #[inline]
    pub(super) fn hash_bytes(self, bytes: &[u8; 64]) -> u64 {
        let (words, _) = bytes.as_chunks::<8>();
        self.hash(|at| u64::from_le_bytes(words[at]))
    }

    #[inline(always)]
    fn hash(self, input: impl Fn(usize) -> u64) -> u64 {
        let mix = |at: usize| fold(input(at) ^ self.keys[at], input(at + 1) ^ self.keys[at + 1]);
        let sum = (64u64.wrapping_mul(PRIME64_1))
            .wrapping_add(mix(0))
            .wrapping_add(mix(2))
            .wrapping_add(mix(4))
            .wrapping_add(mix(6));
        let sum = (sum ^ (sum >> 37)).wrapping_mul(PRIME_MX1);
        sum ^ (sum >> 32)
    }
}

/// Multiplies to 128 bits and folds both halves.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "each half is taken on purpose"
)]
const fn fold(a: u64, b: u64) -> u64 {
    let product = (a as u128) * (b as u128);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Constants of the algorithm's description.
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME_MX1: u64 = 0x1656_6791_9E37_79F9;
/// The first 64 bytes of the default secret.
const SECRET: [[u8; 8]; 8] = [
    [0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe],
    [0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c],
    [0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb],
    [0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f],
    [0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78],
    [0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21],
    [0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e],
    [0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c],
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    use super::*;

    proptest! {
        #[test]
        fn equals_the_general_function(seed: u64, words: [u32; 16]) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            let expected = xxh3_64_with_seed(&bytes, seed);
            prop_assert_eq!(Fixed64::new(seed).hash_words(&words), expected);
            let bytes: [u8; 64] = bytes.try_into().unwrap();
            prop_assert_eq!(Fixed64::new(seed).hash_bytes(&bytes), expected);
        }
    }
}
