//! Benchmarks of kvlane and its peers.
