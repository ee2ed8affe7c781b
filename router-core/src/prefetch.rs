//! Asking the processor to bring memory near: the one module of the crate with `unsafe` in it.
//!
//! A store looks up as many keys as it has blocks, each in another cache line that is seldom near. Plain loads would do, if
//! the lock that follows them did not wait for every one: with prefetches the lines travel while the parent's place is
//! found in the tree. Measured on the whole workload W of `benches`: a quarter of the time of a store, and half of that of a
//! removal.
#![allow(
    unsafe_code,
    reason = "the instruction is unsafe to call; elsewhere there is none, so an expectation would fail"
)]

/// Brings the beginning of a value near, if the processor has nothing better to do. Does nothing on processors for which
/// the standard library has no stable way to say so.
#[inline]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has this instruction (SSE), and it neither faults nor changes anything that a program
    // can see, whatever the address; this one is of a live value besides.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
