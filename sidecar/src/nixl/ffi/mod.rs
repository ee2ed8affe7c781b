//! The one place that calls C: NIXL's C API and CUDA's driver, both loaded at run time, behind types that cannot be misused.
//!
//! Handles are neither `Send` nor `Sync`, so whoever makes one keeps it on its thread. Memory is never lent as a reference
//! while a peer may write to it: it is copied in and out.

#![expect(
    unsafe_code,
    reason = "NIXL and CUDA are C libraries; everything above this module is safe"
)]

mod agent;
mod api;
mod cuda;
mod memory;

pub(super) use self::agent::{Agent, List, Request, Status};
pub(super) use self::api::Api;
pub(super) use self::cuda::Cuda;
pub use self::memory::Memory;
