//! Workers from DNS records, asked of a name server on loopback.

#![expect(
    clippy::disallowed_methods,
    reason = "a test's tasks end with its runtime"
)]

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::proto::op::{Message, OpCode, ResponseCode};
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};
use kvlane_sidecar::config::{Config, DnsSettings};
use kvlane_sidecar::serve::ServeHandle;
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::UdpSocket;

use crate::setup::{engine, eventually, ids, sidecar, until_state, worker};

/// What the server answers to a name.
#[derive(Clone)]
enum Said {
    Records(Vec<(u32, RData)>),
    NoSuchName,
    Failure,
    Nothing,
}

#[derive(Default)]
struct Zone {
    said: HashMap<(String, RecordType), Said>,
    asked: u64,
}

/// A name server; stops when dropped.
struct Server {
    address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    async fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let zone = Arc::<Mutex<Zone>>::default();
        let shared = Arc::clone(&zone);
        let task = tokio::spawn(async move {
            let mut buffer = [0; 4_096];
            loop {
                let (length, peer) = socket.recv_from(&mut buffer).await.unwrap();
                let question = Message::from_vec(&buffer[..length]).unwrap();
                if let Some(answer) = shared.lock().answer(&question) {
                    let _ = socket.try_send_to(&answer.to_vec().unwrap(), peer);
                }
            }
        });
        Self {
            address,
            zone,
            task,
        }
    }

    fn say(&self, name: &str, kind: RecordType, said: Said) {
        self.zone.lock().said.insert((name.to_owned(), kind), said);
    }

    fn say_addresses(&self, name: &str, addresses: &[&str]) {
        for kind in [RecordType::A, RecordType::AAAA] {
            let of_kind = addresses.iter().map(|address| at(address));
            let of_kind = of_kind.filter(|data| data.record_type() == kind);
            self.say(
                name,
                kind,
                Said::Records(of_kind.map(|data| (0, data)).collect()),
            );
        }
    }
}

impl Zone {
    fn answer(&mut self, question: &Message) -> Option<Message> {
        self.asked += 1;
        let query = &question.queries[0];
        let name = query.name().to_ascii().to_ascii_lowercase();
        let mut answer = Message::response(question.metadata.id, OpCode::Query);
        answer.add_query(query.clone());
        match self.said.get(&(name, query.query_type())) {
            Some(Said::Records(records)) => {
                for (ttl, data) in records {
                    answer.add_answer(Record::from_rdata(query.name().clone(), *ttl, data.clone()));
                }
            }
            Some(Said::Failure) => answer.metadata.response_code = ResponseCode::ServFail,
            Some(Said::Nothing) => return None,
            Some(Said::NoSuchName) | None => answer.metadata.response_code = ResponseCode::NXDomain,
        }
        Some(answer)
    }
}

fn at(address: &str) -> RData {
    RData::from(address.parse::<IpAddr>().unwrap())
}

/// Looks for workers as the settings say, ten times a second.
async fn looking(server: &Server, settings: serde_json::Value) -> ServeHandle {
    let mut all = json!({"interval_seconds": 0.1, "grace_seconds": 0.4, "servers": [server.address.to_string()]});
    for (key, value) in settings.as_object().unwrap() {
        all[key] = value.clone();
    }
    let settings: DnsSettings = serde_json::from_value(all).unwrap();
    sidecar(|config: &mut Config| {
        config.discovery.dns.push(settings);
        config.drain_seconds = 0.3;
    })
    .await
}

fn problem(handle: &ServeHandle) -> Option<String> {
    let report = handle.app().pool.report();
    let mut sources = report.sources.into_iter();
    sources
        .find(|source| source.name.starts_with("dns:"))
        .unwrap()
        .error
}

#[tokio::test]
async fn addresses_of_both_families_come_and_go() {
    let server = Server::start().await;
    let engine = engine(1.0).await;
    let port = engine
        .url()
        .rsplit(':')
        .next()
        .unwrap()
        .parse::<u16>()
        .unwrap();
    server.say_addresses("pool.test.", &["127.0.0.1", "127.0.0.2", "::1"]);
    let settings = json!({"name": "pool.test.", "port": port, "role": "decode", "events_port": 5557, "labels": {"zone": "a"}});
    let handle = looking(&server, settings).await;
    let three = [
        format!("127.0.0.1:{port}"),
        format!("127.0.0.2:{port}"),
        format!("[::1]:{port}"),
    ];
    eventually("three workers", || ids(&handle) == three).await;
    until_state(&handle, &three[0], "ready").await;
    let shown = worker(&handle, &three[2]).await;
    assert_eq!(shown["url"], format!("http://[::1]:{port}"));
    assert_eq!(shown["events"], "tcp://[::1]:5557");
    assert_eq!(
        (&shown["role"], &shown["labels"]["zone"]),
        (&"decode".into(), &"a".into())
    );
    assert_eq!(shown["source"], format!("dns:pool.test.:{port}"));
    assert_eq!(problem(&handle), None);
    server.say_addresses("pool.test.", &["127.0.0.1", "::1"]);
    eventually("two workers", || {
        ids(&handle) == [three[0].clone(), three[2].clone()]
    })
    .await;

    // One family fails: its last answer stays, and the other goes on.
    server.say("pool.test.", RecordType::AAAA, Said::Failure);
    server.say(
        "pool.test.",
        RecordType::A,
        Said::Records(vec![(0, at("127.0.0.2"))]),
    );
    eventually("the other address", || {
        ids(&handle) == [three[1].clone(), three[2].clone()]
    })
    .await;
    eventually("the failure is told", || problem(&handle).is_some()).await;
}

#[tokio::test]
async fn a_name_that_vanishes_keeps_its_workers_for_a_grace() {
    let server = Server::start().await;
    server.say_addresses("pool.test.", &["127.0.0.1"]);
    let handle = looking(
        &server,
        json!({"name": "pool.test.", "port": 9, "grace_seconds": 1.0}),
    )
    .await;
    eventually("one worker", || ids(&handle) == ["127.0.0.1:9"]).await;
    for kind in [RecordType::A, RecordType::AAAA] {
        server.say("pool.test.", kind, Said::NoSuchName);
    }
    eventually("the absence is told", || problem(&handle).is_some()).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!handle.app().fleet.members().list()[0].is_draining());
    server.say_addresses("pool.test.", &["127.0.0.1"]);
    eventually("it is back", || problem(&handle).is_none()).await;
    let epoch = handle.app().fleet.members().list()[0].epoch();
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert_eq!(handle.app().fleet.members().list()[0].epoch(), epoch);
    for kind in [RecordType::A, RecordType::AAAA] {
        server.say("pool.test.", kind, Said::NoSuchName);
    }
    eventually("gone after the grace", || ids(&handle).is_empty()).await;
}

#[tokio::test]
async fn services_are_named_after_their_hosts_and_live_as_long_as_their_addresses() {
    let server = Server::start().await;
    let service = |host: &str, port| {
        let target = Name::from_ascii(host).unwrap();
        (0, RData::SRV(SRV::new(0, 0, port, target)))
    };
    let services = Said::Records(vec![service("w-0.test.", 8001), service("w-1.test.", 8002)]);
    server.say("_http._tcp.test.", RecordType::SRV, services);
    server.say_addresses("w-0.test.", &["127.0.0.1"]);
    server.say_addresses("w-1.test.", &["::1"]);
    let handle = looking(&server, json!({"srv": "_http._tcp.test."})).await;
    eventually("two workers", || {
        ids(&handle) == ["w-0.test:8001", "w-1.test:8002"]
    })
    .await;
    let first = worker(&handle, "w-1.test:8002").await;
    assert_eq!(
        (&first["url"], &first["instance"]),
        (&"http://[::1]:8002".into(), &"::1".into())
    );

    // A host whose address is not told hides none of the others, and is not taken for gone.
    server.say("w-1.test.", RecordType::A, Said::Failure);
    eventually("the failure is told", || problem(&handle).is_some()).await;
    assert_eq!(ids(&handle).len(), 2);

    server.say_addresses("w-1.test.", &["127.0.0.3"]);
    eventually("another life", || {
        let members = handle.app().fleet.members();
        members
            .find("w-1.test:8002")
            .is_some_and(|worker| worker.instance() == "127.0.0.3")
    })
    .await;
    let second = worker(&handle, "w-1.test:8002").await;
    assert_eq!(second["url"], "http://127.0.0.3:8002");
    assert!(second["epoch"].as_u64() > first["epoch"].as_u64());
    server.say(
        "_http._tcp.test.",
        RecordType::SRV,
        Said::Records(vec![service("w-0.test.", 8001)]),
    );
    eventually("one worker", || ids(&handle) == ["w-0.test:8001"]).await;
}

#[tokio::test]
async fn a_silent_server_costs_no_worker() {
    let server = Server::start().await;
    server.say_addresses("pool.test.", &["127.0.0.1"]);
    let handle = looking(&server, json!({"name": "pool.test.", "port": 9})).await;
    eventually("one worker", || ids(&handle) == ["127.0.0.1:9"]).await;
    for kind in [RecordType::A, RecordType::AAAA] {
        server.say("pool.test.", kind, Said::Nothing);
    }
    let asked = server.zone.lock().asked;
    eventually("asked again", || server.zone.lock().asked > asked + 2).await;
    assert_eq!(ids(&handle), ["127.0.0.1:9"]);
}

#[tokio::test]
async fn a_records_own_life_bounds_the_pause() {
    let server = Server::start().await;
    let long = vec![(3_600, at("127.0.0.1"))];
    server.say("long.test.", RecordType::A, Said::Records(long));
    server.say("long.test.", RecordType::AAAA, Said::Records(vec![]));
    let handle = looking(
        &server,
        json!({"name": "long.test.", "port": 9, "interval_seconds": 60.0}),
    )
    .await;
    eventually("one worker", || ids(&handle) == ["127.0.0.1:9"]).await;
    let short = vec![(1, at("127.0.0.2"))];
    server.say("short.test.", RecordType::A, Said::Records(short));
    server.say("short.test.", RecordType::AAAA, Said::Records(vec![]));
    let other = looking(
        &server,
        json!({"name": "short.test.", "port": 9, "interval_seconds": 60.0}),
    )
    .await;
    eventually("one worker", || ids(&other) == ["127.0.0.2:9"]).await;
    let asked = server.zone.lock().asked;
    eventually("the short one is asked again", || {
        server.zone.lock().asked >= asked + 4
    })
    .await;
    server.say_addresses("short.test.", &["127.0.0.3"]);
    eventually("its new address", || {
        ids(&other).contains(&"127.0.0.3:9".to_owned())
    })
    .await;
    assert_eq!(ids(&handle), ["127.0.0.1:9"]);
}
