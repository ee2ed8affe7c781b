//! Live heap of the process, where its allocator counts.

use std::fs;

use stats_alloc::INSTRUMENTED_SYSTEM;

/// Returns the bytes that were allocated and not freed, as asked for; zero in a binary whose allocator is not
/// [`INSTRUMENTED_SYSTEM`].
#[must_use]
pub fn live_bytes() -> usize {
    let stats = INSTRUMENTED_SYSTEM.stats();
    stats.bytes_allocated.wrapping_sub(stats.bytes_deallocated)
}

/// Returns the resident set of the process in bytes; zero where the kernel does not tell.
#[must_use]
pub fn resident_bytes() -> usize {
    let pages = fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|statm| statm.split_whitespace().nth(1)?.parse::<usize>().ok());
    pages.unwrap_or(0) * rustix::param::page_size()
}
