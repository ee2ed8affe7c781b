//! Memory with known bytes, and how a transfer lies in it.

/// Returns the bytes of a pattern at an offset that is a multiple of 8.
pub(super) fn pattern(offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length.next_multiple_of(8));
    let mut at = offset as u64;
    while bytes.len() < length {
        bytes.extend_from_slice(&at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        at += 8;
    }
    bytes.truncate(length);
    bytes
}

/// Returns offset and length of each piece, in an order in which none follows its neighbour: a library that joins neighbours
/// would move them as one.
#[cfg(any(feature = "nixl", test))]
pub(super) fn pieces(start: usize, bytes: usize, piece: usize) -> Vec<(usize, usize)> {
    let count = bytes.div_ceil(piece);
    let at = |index: usize| {
        let offset = index * piece;
        (start + offset, piece.min(bytes - offset))
    };
    // Odd ones first, then even ones.
    (1..count)
        .step_by(2)
        .chain((0..count).step_by(2))
        .map(at)
        .collect()
}
