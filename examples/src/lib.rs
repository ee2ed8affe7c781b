//! Runnable examples, in `examples/`:
//!
//! * `embed`: the router inside a gateway of one's own, fed with events that arrive by any transport;
//! * `follow_engine`: the router following an engine's ZeroMQ stream by itself.
//!
//! `cargo run -p kvlane-examples --example embed`
