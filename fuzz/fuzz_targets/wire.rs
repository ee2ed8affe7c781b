//! Decoding an engine's event batch never panics, and decode, encode, decode agrees.
#![no_main]

libfuzzer_sys::fuzz_target!(|payload: &[u8]| kvlane_fuzz::wire::check(payload));
