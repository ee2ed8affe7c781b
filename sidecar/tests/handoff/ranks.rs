//! Workers of several data-parallel ranks behind one address.

use std::sync::Arc;

use kvlane_sidecar::handoff::Connector;
use parking_lot::Mutex;
use serde_json::Value;

use crate::concurrent::keeping;
use crate::served::{COMPLETIONS, alone, completion, read};
use crate::world::{Plan, World};

#[tokio::test]
async fn each_leg_reaches_its_own_rank_and_the_two_meet() {
    let expected = alone(COMPLETIONS, &completion(1, false)).await;
    for connector in Connector::ALL {
        let bodies: [Arc<Mutex<Vec<Value>>>; 2] = Default::default();
        let world = World::start(Plan {
            connector,
            prefill_rank: (1, 2),
            decode_rank: (2, 3),
            prefill_hook: keeping(Arc::clone(&bodies[0])),
            decode_hook: keeping(Arc::clone(&bodies[1])),
            ..Plan::default()
        })
        .await;
        for number in 0..4 {
            let reply = world
                .ask(COMPLETIONS, &completion(1, number % 2 == 0))
                .await;
            assert_eq!(reply.status, 200, "{connector:?}: {}", reply.text);
            assert_eq!(read(&reply.text).0, expected, "{connector:?}");
        }
        world.is_clean().await;
        assert_eq!(world.metrics.ended("split"), 4);
        assert_eq!(world.decode.transfers().fetched, 4);
        let other = world.other.as_ref().unwrap().stats();
        assert_eq!(other.finished_requests, 0, "{connector:?}");
        let [prefill, decode] = bodies.map(|bodies| bodies.lock().clone());
        for (prefill, decode) in prefill.iter().zip(&decode) {
            let named = |body: &Value, name: &str| body[name].as_u64();
            let is_sglang = connector == Connector::Sglang;
            // vLLM's ranks are in a header.
            let rank = |rank: u64| is_sglang.then_some(rank);
            assert_eq!(named(prefill, "routed_dp_rank"), rank(1));
            assert_eq!(named(decode, "routed_dp_rank"), rank(2));
            assert_eq!(named(decode, "disagg_prefill_dp_rank"), rank(1));
            // Decode workers that are not told take the room's.
            let room = named(decode, "bootstrap_room");
            assert_eq!(room.map(|room| room % 2), rank(1));
        }
    }
}
