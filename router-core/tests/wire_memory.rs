//! Peak heap use of decoding hostile payloads, against their length.

use kvlane::event::wire::decode_batch;

/// An array of an unknown number of elements: `0x000f0000` are claimed.
const CLAIM: [u8; 5] = [0xdd, 0, 0x0f, 0, 0];

#[test]
fn a_lying_length_reserves_nothing() {
    let lie = [0xdd_u8, 0xff, 0xff, 0xff, 0xff];
    let hashes = batch(&[stored(), &lie, &[1]].concat());
    let tokens = batch(&[stored(), &[0x91, 1, 0xc0], &lie, &[1]].concat());
    let events = [&[0x93, 0xca, 0, 0, 0, 0][..], &lie].concat();
    for payload in [hashes, tokens, events] {
        assert!(decode_batch(&payload).is_err());
        // One event of about 220 bytes in a list that begins with room for four.
        let peak = peak_bytes(&payload);
        assert!(peak < 1_000, "{peak} bytes");
    }
}

#[test]
fn a_length_that_could_be_true_reserves_what_the_payload_bears() {
    // 1 MiB in which each byte could be an element of whatever claims to be here.
    let filler = vec![0_u8; 1 << 20];
    // An event takes about 220 bytes here and 18 there at least: a factor of 13.
    let events = [&[0x93, 0xca, 0, 0, 0, 0][..], &CLAIM, &filler].concat();
    let peak = peak_bytes(&events);
    assert!(peak < 14 << 20, "{peak} bytes");
    // A hash takes 24 bytes here and one there at least, and the list doubles while it grows: a factor of 24 + 48.
    let hashes = batch(&[stored(), &CLAIM, &filler].concat());
    let peak = peak_bytes(&hashes);
    assert!(peak < 72 << 20, "{peak} bytes");
}

#[test]
fn nesting_costs_no_memory() {
    let mut payload = batch(&vec![0x91; 1 << 20]);
    payload.push(0);
    let peak = peak_bytes(&payload);
    assert!(peak < 1_000, "{peak} bytes");
}

fn peak_bytes(payload: &[u8]) -> u64 {
    allocation_counter::measure(|| drop(decode_batch(payload))).bytes_max
}

/// `[1.5, [event], 0]`
fn batch(event: &[u8]) -> Vec<u8> {
    let head = [0x93, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x91];
    [&head, event, &[0]].concat()
}

/// The begin of a store in an array of six elements.
const fn stored() -> &'static [u8] {
    b"\x96\xabBlockStored"
}
