//! What goes wrong between two workers, for every protocol that the router drives.
//!
//! Each row is a test, each cell a column of [`PROTOCOLS`] with what the client must get. Every cell is tried as completion
//! and as chat, streamed and whole; the answer must come within 100 ms of the failure, and nothing may be left behind.
//!
//! | row | NIXL | SGLang | Mooncake |
//! |---|---|---|---|
//! | the prefill worker answers an HTTP error | local | 502, or its 429 or 503 | local |
//! | the prefill worker answers without parameters | local | - | - |
//! | the client leaves between the legs | gone | gone | gone |
//! | the decode worker dies before it has the cache | 502 | 502 | 502 |
//! | the decode worker gives the queued request up | local | its 503 | local |
//! | the prefill worker restarts | local | 502 | local |
//!
//! SGLang's decode workers cannot process a prompt; its and Mooncake's prefill answers carry no parameters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvlane_sidecar::engine::Refusal;
use kvlane_sidecar::handoff::Connector;
use parking_lot::Mutex;
use serde_json::Value;

use crate::gate::{Act, Hook, always};
use crate::served::{CHAT, COMPLETIONS, alone, chat, completion, read};
use crate::world::{Plan, World};
use crate::{answers_quickly, eventually};

const PROTOCOLS: [Connector; 3] = Connector::ALL;

/// What the client gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    /// The right answer, computed by the decode worker alone.
    Local,
    /// A clear error.
    BadGateway,
    /// The worker's own word that it is busy.
    Busy(u16),
    /// The protocol knows no such fault.
    None,
}

/// A fault on its way: when it happened, and the world for those that change it.
#[derive(Clone, Default)]
struct Fault {
    at: Arc<Mutex<Option<Instant>>>,
    world: Arc<Mutex<Option<Arc<World>>>>,
    /// The prefill worker restarts before the request comes: what was known of it is of a life that is over.
    restarts_first: Arc<AtomicBool>,
}

impl Fault {
    fn happens(&self) {
        self.at.lock().get_or_insert_with(Instant::now);
    }

    fn world(&self) -> Option<Arc<World>> {
        self.world.lock().clone()
    }
}

/// Harms the first request at a door, a moment after it came: the other leg is there by then.
fn harming(fault: &Fault, act: Act, restarts: bool) -> Hook {
    let fault = fault.clone();
    Arc::new(move |number, _| {
        let (fault, act) = (fault.clone(), act.clone());
        Box::pin(async move {
            if number > 0 {
                return Act::Pass;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            if restarts && let Some(world) = fault.world() {
                world.restart_prefill().await;
            }
            fault.happens();
            act
        })
    })
}

fn shapes() -> [(&'static str, Value); 4] {
    [
        (COMPLETIONS, completion(1, false)),
        (COMPLETIONS, completion(1, true)),
        (CHAT, chat(false)),
        (CHAT, chat(true)),
    ]
}

/// Plays a row: makes a world for each cell and shape with a fault in it, asks, and holds the answer against the cell.
async fn row(cells: [Cell; 3], expected: &[Refusal], plan: impl Fn(Connector, &Fault) -> Plan) {
    for (connector, cell) in PROTOCOLS.into_iter().zip(cells) {
        if cell == Cell::None {
            continue;
        }
        for (path, body) in shapes() {
            let words = alone(path, &body).await;
            answers_quickly(&format!("{connector:?} {path}"), async || {
                play(connector, (path, &body), (cell, &words), expected, &plan).await
            })
            .await;
        }
    }
}

async fn play(
    connector: Connector,
    (path, body): (&'static str, &Value),
    (cell, words): (Cell, &str),
    expected: &[Refusal],
    plan: &impl Fn(Connector, &Fault) -> Plan,
) -> Duration {
    let fault = Fault::default();
    let plan = Plan {
        connector,
        ..plan(connector, &fault)
    };
    let world = Arc::new(World::start(plan).await);
    *fault.world.lock() = Some(Arc::clone(&world));
    if fault.restarts_first.load(Ordering::Relaxed) {
        world.restart_prefill().await;
    }
    let reply = world.ask(path, body).await;
    let answered = Instant::now();
    fault.world.lock().take();
    match cell {
        Cell::Local => {
            assert_eq!(reply.status, 200, "{connector:?}: {}", reply.text);
            let (got, usage) = read(&reply.text);
            assert_eq!(got, words, "{connector:?}");
            // It computed everything itself.
            assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
        }
        Cell::BadGateway | Cell::None => {
            assert_eq!(reply.status, 502, "{connector:?}: {}", reply.text);
            assert_eq!(reply.json()["error"]["code"], "bad_gateway");
        }
        Cell::Busy(status) => {
            assert_eq!(reply.status, status, "{connector:?}: {}", reply.text);
            assert_eq!(reply.text, "{}");
        }
    }
    world.is_clean_but(expected).await;
    let name = if cell == Cell::Local {
        "local"
    } else {
        "bad_gateway"
    };
    assert_eq!(world.metrics.ended(name), 1);
    let happened = fault.at.lock().expect("the fault did not happen");
    answered.saturating_duration_since(happened)
}

#[tokio::test]
async fn row_1_the_prefill_worker_answers_an_http_error() {
    for status in [500, 503, 429] {
        let refused = match status {
            500 => Cell::BadGateway,
            busy => Cell::Busy(busy),
        };
        row([Cell::Local, refused, Cell::Local], &[], |_, fault| Plan {
            prefill_hook: harming(fault, Act::Status(status, "{}"), false),
            ..Plan::default()
        })
        .await;
    }
}

#[tokio::test]
async fn row_2_the_prefill_worker_answers_without_parameters() {
    let cells = [Cell::Local, Cell::None, Cell::None];
    for answer in [
        "{\"choices\":[]}",
        "{\"kv_transfer_params\":null}",
        "no json",
    ] {
        row(cells, &[], |_, fault| Plan {
            prefill_hook: harming(fault, Act::Status(200, answer), false),
            ..Plan::default()
        })
        .await;
    }
}

#[tokio::test]
async fn row_3_the_client_leaves_between_the_legs() {
    for connector in PROTOCOLS {
        for (path, body) in shapes() {
            // The decode worker has the request and takes nothing.
            let world = Arc::new(
                World::start(Plan {
                    connector,
                    decode_hook: always(Act::Hang),
                    ..Plan::default()
                })
                .await,
            );
            let asking = {
                let world = Arc::clone(&world);
                tokio::spawn(async move { world.ask(path, &body).await })
            };
            eventually("both legs run", || world.decode_gate.requests() == 1).await;
            asking.abort();
            // The lease of NIXL's prefill ends; the legs of the others are closed.
            world.is_clean().await;
            assert_eq!(world.metrics.ended("left"), 1);
        }
    }
}

#[tokio::test]
async fn row_4_the_decode_worker_dies_before_it_has_the_cache() {
    row([Cell::BadGateway; 3], &[], |_, fault| Plan {
        decode_hook: harming(fault, Act::Cut, false),
        ..Plan::default()
    })
    .await;
}

#[tokio::test]
async fn row_5_the_decode_worker_gives_the_queued_request_up() {
    let cells = [Cell::Local, Cell::Busy(503), Cell::Local];
    row(cells, &[], |_, fault| Plan {
        decode_hook: harming(fault, Act::Status(503, "{}"), false),
        ..Plan::default()
    })
    .await;
}

#[tokio::test]
async fn row_6_the_prefill_worker_restarts() {
    let cells = [Cell::Local, Cell::BadGateway, Cell::Local];
    // The decode engine is told of a life that is over, and refuses; a real one answers 500 as well.
    row(cells, &[Refusal::OtherEngine], |connector, fault| {
        match connector {
            // After its answer, before its cache is fetched.
            Connector::Nixl => Plan {
                decode_hook: harming(fault, Act::Pass, true),
                ..Plan::default()
            },
            // The connection of its leg ends with it.
            Connector::Sglang => Plan {
                prefill_hook: harming(fault, Act::Cut, true),
                ..Plan::default()
            },
            // After it was asked for its engine's id.
            Connector::Mooncake => {
                fault.restarts_first.store(true, Ordering::Relaxed);
                Plan {
                    decode_hook: harming(fault, Act::Pass, false),
                    ..Plan::default()
                }
            }
        }
    })
    .await;
}
