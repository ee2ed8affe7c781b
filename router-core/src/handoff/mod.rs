//! Plans the handoff of a request from prefill to decode: which two workers, or one alone.
//!
//! Splitting costs time to the first token, because the KV cache must move; it spares running streams the stall that a
//! prompt causes where they decode. Both are predicted from what was measured, never from a datasheet:
//!
//! * on one worker, the first token comes after `queue + prefill`;
//! * on two, after `queue + prefill + fixed + bytes ÷ (throughput of that link, shared with its other transfers)`;
//! * a stream that decodes where a prompt is processed waits for each step of it, one that decodes where a cache arrives
//!   once for the engine to take it in.
//!
//! The operator's targets weigh the two against each other: missing one by its half is as bad as missing the other by its
//! half. Gaps within their target cost nothing, so streams that are served well enough are not spared at the cost of a later
//! first token. [`HandoffPlanner`] learns and plans; [`KvShape`] knows the bytes.
//!
//! Nothing here has a clock or does I/O. A plan is a pure function of what was observed before, so equal histories plan
//! alike.

#[cfg(feature = "json")]
mod attention;
mod estimate;
mod interference;
mod kv_shape;
#[cfg(feature = "json")]
mod layers;
mod line;
mod link;
#[cfg(feature = "json")]
mod model_config;
mod options;
mod plan;
mod planner;
#[cfg(test)]
mod tests;

#[cfg(feature = "json")]
pub use attention::attention_tokens;
pub use estimate::{GapCause, PrefillWork};
pub use kv_shape::KvShape;
#[cfg(feature = "json")]
pub use model_config::KvOptions;
pub use options::{HandoffConfig, LinkId, PlanRequest, PlanWorker, PrefillSeed};
pub use plan::{
    DecidedBy, Excluded, HandoffOption, HandoffPlan, ItlTerms, Reason, Route, TtftTerms,
};
pub use planner::{HandoffPlanner, HandoffStats, LinkStats, PrefillStats, TransferGuard};
