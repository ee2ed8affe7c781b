//! What is learned of a link from requests that pass over it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::handoff::{KvShape, LinkId, LinkStats, PlanRequest, PlanWorker, PrefillSeed};
use kvlane::{Role, WorkerId, WorkerRank};
use kvlane_sidecar::handoff::Connector;

use crate::gate::{Act, Hook};
use crate::served::{COMPLETIONS, completion};
use crate::world::{Plan, World};

/// How long the decode leg takes beyond what it does: a slow link.
const DELAY: Duration = Duration::from_millis(200);
/// Bytes that are said to move.
const BYTES: f64 = 64e6;

fn delaying() -> Hook {
    Arc::new(|_, _| {
        Box::pin(async {
            tokio::time::sleep(DELAY).await;
            Act::Pass
        })
    })
}

fn worker(id: &str, role: Role) -> PlanWorker {
    let worker = WorkerId::new(id).unwrap();
    PlanWorker::new(WorkerRank { worker, dp_rank: 0 }, role).serves_alone(false)
}

/// Sends three requests over a link that is seeded far too fast, and returns what is known of it then.
async fn learned(connector: Connector, stream: bool, knows_prefill: bool) -> LinkStats {
    let world = World::start(Plan {
        connector,
        decode_hook: delaying(),
        ..Plan::default()
    })
    .await;
    let planner = &world.planner;
    let link = LinkId::new("link");
    planner.seed_link(&link, 1e12, Duration::ZERO).unwrap();
    let workers = [worker("p", Role::Prefill), worker("d", Role::Decode)];
    if knows_prefill {
        let seed = PrefillSeed::tokens_per_second(100_000.0);
        planner.seed_prefill(&workers[0].target, &seed).unwrap();
    }
    let shape = KvShape::per_token(BYTES / 64.0).unwrap();
    let request = PlanRequest {
        input_tokens: 64,
        shape: &shape,
        splittable: true,
    };
    for number in 0..3 {
        let now = Instant::now();
        let plan = planner.plan(&request, &workers, |_, _| Some(link.clone()), now);
        *world.transfer.lock() = planner.book(&plan, now);
        let reply = world
            .ask(COMPLETIONS, &completion(1 + 100 * number, stream))
            .await;
        assert_eq!(reply.status, 200, "{connector:?}: {}", reply.text);
    }
    world.is_clean().await;
    let stats = planner.stats().links.remove(0);
    assert_eq!(stats.open_transfers, 0);
    stats
}

#[tokio::test]
async fn a_link_is_learned_from_streams_of_every_protocol() {
    for connector in Connector::ALL {
        let link = learned(connector, true, true).await;
        assert!(link.is_measured, "{connector:?}: {link:?}");
        // 200 ms for 64 MB; the machine may be busy.
        let seconds = BYTES / link.bytes_per_second.unwrap();
        assert!((0.15..2.0).contains(&seconds), "{connector:?}: {link:?}");
    }
}

#[tokio::test]
async fn what_tells_no_time_teaches_no_link() {
    // The first byte of a whole answer comes with its last token.
    for connector in Connector::ALL {
        let link = learned(connector, false, true).await;
        assert_eq!(
            (link.measurements, link.is_measured),
            (0, false),
            "{connector:?}"
        );
    }
    // Where legs run together, the end of a prefill has to be known.
    for connector in [Connector::Sglang, Connector::Mooncake] {
        let link = learned(connector, true, false).await;
        assert_eq!(
            (link.measurements, link.is_measured),
            (0, false),
            "{connector:?}"
        );
    }
    assert!(learned(Connector::Nixl, true, false).await.is_measured);
}
