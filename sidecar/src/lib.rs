//! kvlane sidecar: the proxy, the simulated engine and what the `kvlane` command is made of.

pub mod admin;
pub mod app;
mod bounded;
mod client_io;
pub mod config;
pub mod demo;
pub mod engine;
pub mod events;
pub mod fleet;
pub mod forward;
mod frame;
pub mod handoff;
pub mod link;
pub mod metrics;
pub mod net;
#[cfg(feature = "nixl")]
pub mod nixl;
mod open_files;
pub mod plan;
pub mod pool;
pub mod proxy;
pub mod request;
pub mod scrape;
pub mod serve;
pub mod signals;
mod sparing;
pub mod tokenize;
pub mod tokenizer;
