//! The radix tree and the reference model agree after every operation.
#![no_main]

libfuzzer_sys::fuzz_target!(|scenario: &[u8]| kvlane_fuzz::index_vs_naive::check(scenario));
