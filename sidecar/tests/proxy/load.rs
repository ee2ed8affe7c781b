//! Bookings: visible while requests wait, gone when they end, however they end.

use std::time::{Duration, Instant};

use kvlane_sidecar::config::PolicyKind;
use kvlane_sidecar::serve::ServeHandle;

use crate::client::{CHAT, Client, chat, post};
use crate::mock::{Hold, Mock, Step, chunk, events_head, json, last_chunk};
use crate::setup::{eventually, metric, sidecar, sidecar_with, sum};

#[tokio::test]
async fn load_is_booked_while_headers_are_held_back() {
    for (policy, stream) in [
        (PolicyKind::Kv, false),
        (PolicyKind::Kv, true),
        (PolicyKind::LeastLoaded, true),
    ] {
        let hold = Hold::new();
        let held = hold.clone();
        let slow = move |_: &_| {
            let mut steps = vec![Step::Until(held.clone())];
            if stream {
                steps.push(Step::Send(events_head()));
                steps.push(Step::Send(chunk(b"data: [DONE]\n\n")));
                steps.push(Step::Send(last_chunk()));
            } else {
                steps.push(Step::Send(json(200, "{}")));
            }
            steps
        };
        let workers = [
            Mock::start(slow.clone()).await,
            Mock::start(slow.clone()).await,
            Mock::start(slow).await,
        ];
        let handle = sidecar_with(&[&workers[0], &workers[1], &workers[2]], |config| {
            config.policy = policy
        })
        .await;
        let address = handle.proxy_addr;
        let requests: Vec<_> = (0..12)
            .map(|number| {
                tokio::spawn(async move { post(address, CHAT, &chat(number, stream)).await.status })
            })
            .collect();
        eventually("12 booked", || async {
            sum(&handle, "active_requests").await >= 12.0
        })
        .await;
        hold.release(12);
        for request in requests {
            assert_eq!(request.await.unwrap(), 200);
        }
        let counts: Vec<_> = workers.iter().map(Mock::count).collect();
        assert!(
            counts.iter().all(|count| (3..=5).contains(count)),
            "{policy:?} {stream}: {counts:?}"
        );
        eventually("none booked", || async {
            sum(&handle, "active_requests").await == 0.0
        })
        .await;
        assert_eq!(sum(&handle, "active_blocks").await, 0.0);
    }
}

#[tokio::test]
async fn a_client_that_leaves_frees_everything_within_a_second() {
    let worker = Mock::start(|request| match request.header("x-case") {
        Some("streaming") => vec![
            Step::Send(events_head()),
            Step::Send(chunk(b"data: {}\n\n")),
            Step::Hang,
        ],
        _ => vec![Step::Hang],
    })
    .await;
    let handle = sidecar(&[&worker]).await;
    let mut quickest = Duration::MAX;
    let mut rounds = 0;
    // The machine may be busy: tried until it is quick.
    while quickest >= Duration::from_secs(1) && rounds < 10 {
        quickest = quickest.min(leave(&worker, &handle, 25 * rounds).await);
        rounds += 1;
    }
    assert!(quickest < Duration::from_secs(1), "{quickest:?}");
    assert_eq!(sum(&handle, "in_flight").await, 0.0);
    assert_eq!(sum(&handle, "active_blocks").await, 0.0);
    assert!(
        metric(&handle, "kvlane_cancelled_requests_total{worker=\"w1\"}").await
            >= f64::from(u32::try_from(25 * rounds).unwrap())
    );
    worker.set_script(|_| vec![Step::Send(json(200, "{}"))]);
    assert_eq!(post(handle.proxy_addr, CHAT, "{}").await.status, 200);
}

/// Clients leave, some of them before there is an answer; returns how long it takes until nothing of them is left.
async fn leave(worker: &Mock, handle: &ServeHandle, first: usize) -> Duration {
    for round in first..first + 25 {
        for case in ["streaming", "before-headers", "plain"] {
            let before = worker.count();
            let mut client = Client::connect(handle.proxy_addr).await;
            let body = chat(round, case != "plain");
            client
                .send("POST", CHAT, &[("x-case", case)], body.as_bytes())
                .await;
            if case == "streaming" {
                client.head().await;
                client.chunk().await.unwrap();
            } else {
                eventually("sent", || async { worker.count() > before }).await;
            }
            drop(client);
        }
    }
    let started = Instant::now();
    eventually("upstream closed", || async {
        worker.abandoned() == worker.count()
    })
    .await;
    eventually("none booked", || async {
        sum(handle, "active_requests").await == 0.0
    })
    .await;
    started.elapsed()
}

#[tokio::test]
async fn every_policy_spreads_and_books() {
    for policy in PolicyKind::ALL {
        let workers = [Mock::ok().await, Mock::ok().await, Mock::ok().await];
        let handle = sidecar_with(&[&workers[0], &workers[1], &workers[2]], |config| {
            config.policy = policy
        })
        .await;
        for _ in 0..60 {
            assert_eq!(post(handle.proxy_addr, CHAT, "{}").await.status, 200);
        }
        for worker in &workers {
            let count = worker.count();
            let expected = if policy == PolicyKind::RoundRobin {
                20..=20
            } else {
                8..=34
            };
            assert!(expected.contains(&count), "{policy:?}: {count}");
        }
        let name = policy.as_str();
        let mut decisions = 0.0;
        for id in ["w1", "w2", "w3"] {
            decisions += metric(
                &handle,
                &format!("kvlane_decisions_total{{policy=\"{name}\",worker=\"{id}\"}}"),
            )
            .await;
        }
        assert_eq!(decisions, 60.0);
        assert_eq!(
            metric(&handle, "kvlane_router_decisions_total").await,
            60.0,
            "booked by the router"
        );
    }
}

#[tokio::test]
async fn repeats_go_to_the_worker_that_saw_the_prefix() {
    let workers = [Mock::ok().await, Mock::ok().await, Mock::ok().await];
    let handle = sidecar(&[&workers[0], &workers[1], &workers[2]]).await;
    for _ in 0..10 {
        for number in 0..6 {
            post(handle.proxy_addr, CHAT, &chat(number, false)).await;
        }
    }
    let mut owners =
        std::collections::BTreeMap::<Vec<u8>, std::collections::BTreeSet<usize>>::new();
    for (index, worker) in workers.iter().enumerate() {
        for seen in worker.seen() {
            owners.entry(seen.body).or_default().insert(index);
        }
    }
    assert!(
        owners.values().all(|owners| owners.len() == 1),
        "{:?}",
        owners.values()
    );
}

#[tokio::test]
async fn reported_load_reaches_the_decision() {
    let (busy, idle) = (Mock::ok().await, Mock::ok().await);
    busy.set_metrics("vllm:num_requests_running 50\nvllm:num_requests_waiting 50\nvllm:kv_cache_usage_perc 0.9\nvllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"100\"} 1\n");
    idle.set_metrics("vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\nvllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"100\"} 1\n");
    let handle = sidecar_with(&[&busy, &idle], |config| config.router.request_weight = 1.0).await;
    // 100 blocks of 32 tokens are 200 of the router's 16.
    eventually("scraped", || async {
        sum(&handle, "kv_capacity_blocks").await == 400.0
    })
    .await;
    for number in 0..10 {
        post(handle.proxy_addr, CHAT, &chat(number, false)).await;
    }
    assert_eq!((busy.count(), idle.count()), (0, 10));
}

#[tokio::test]
async fn a_client_that_stays_and_reads_nothing_is_given_up() {
    const LENGTH: usize = 64 << 20;
    let worker = Mock::start(|_| {
        let mut answer =
            format!("HTTP/1.1 200 OK\r\ncontent-length: {LENGTH}\r\n\r\n").into_bytes();
        answer.resize(answer.len() + LENGTH, b'x');
        vec![Step::Send(answer)]
    })
    .await;
    // Longer than a busy machine stalls.
    let idle = Duration::from_millis(1500);
    let handle = sidecar_with(&[&worker], |config| {
        config.client_idle_timeout_seconds = idle.as_secs_f64();
    })
    .await;
    let mut client = Client::connect(handle.proxy_addr).await;
    client
        .send("POST", CHAT, &[], chat(1, true).as_bytes())
        .await;
    eventually("sent", || async { worker.count() == 1 }).await;
    eventually("none booked", || async {
        sum(&handle, "active_requests").await == 0.0
    })
    .await;
    // One that reads slowly, and never pauses for that long, gets everything.
    let mut slow = Client::connect(handle.proxy_addr).await;
    slow.send("POST", CHAT, &[], chat(2, true).as_bytes()).await;
    slow.head().await;
    let begun = Instant::now();
    let mut pauses = 0;
    while begun.elapsed() < 2 * idle {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(slow.skip(1 << 20).await, "after {:?}", begun.elapsed());
        pauses += 1;
    }
    assert!(slow.skip(LENGTH - pauses * (1 << 20)).await);
    drop(client);
}
