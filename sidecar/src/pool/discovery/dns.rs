//! Workers from DNS records: each address of a name with one port for all, or each SRV record.
//!
//! The DNS cannot tell lives apart, but a host's name that leads to another address is another process: a worker found by SRV
//! is named after its host and lives as long as its address stays. A worker found by address is named after the address.

mod answers;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::proto::rr::{RData, RecordType};
use kvlane::WorkerId;

use answers::{Answers, Outcome, Place};

use crate::config::{DnsSettings, seconds};
use crate::net::HostPort;
use crate::pool::roster::{Phase, Sighting};
use crate::pool::sources::Feed;

/// Most workers that are taken from one name.
const MAX_PLACES: usize = 4_096;
/// Shortest pause between two questions, whatever the records say of their life.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a question that was not answered.
const RETRY: Duration = Duration::from_secs(5);

/// Publishes what the records say, until it is dropped.
pub async fn follow(settings: DnsSettings, feed: Feed) {
    let interval = seconds(settings.interval_seconds);
    let mut answers = Answers::new(seconds(settings.grace_seconds));
    let mut resolver = None;
    loop {
        if resolver.is_none() {
            // Built here and not at the start: a system without a configuration now may have one later.
            match build(&settings) {
                Ok(built) => resolver = Some(built),
                Err(error) => feed.report.failed(error),
            }
        }
        let mut pause = interval.min(RETRY);
        if let Some(resolver) = &resolver {
            let (outcomes, life) = ask(resolver, &settings).await;
            let (places, problem) = answers.take(outcomes, Instant::now());
            if problem.is_none() {
                pause = interval.min(life.max(MIN_PAUSE));
            }
            let problem = match sightings(&settings, &places) {
                Ok(list) => {
                    feed.roster.publish(list);
                    problem
                }
                Err(refused) => Some(refused),
            };
            match problem {
                Some(problem) => feed.report.failed(problem),
                None => feed.report.succeeded(),
            }
        }
        tokio::time::sleep(pause).await;
    }
}

fn build(settings: &DnsSettings) -> Result<TokioResolver, String> {
    let text = |error: NetError| format!("the system's name servers cannot be read: {error}");
    let mut builder = if settings.servers.is_empty() {
        TokioResolver::builder_tokio().map_err(text)?
    } else {
        let servers = settings
            .servers
            .iter()
            .filter_map(|server| server.parse::<SocketAddr>().ok());
        let config = ResolverConfig::from_name_servers(servers.map(name_server).collect());
        let provider = TokioRuntimeProvider::default();
        TokioResolver::builder_with_config(config, provider).with_options(ResolverOpts::default())
    };
    // What is asked is wanted anew: when to ask again is decided here.
    builder.options_mut().cache_size = 0;
    builder.build().map_err(text)
}

fn name_server(address: SocketAddr) -> NameServerConfig {
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut connection| {
        connection.port = address.port();
        connection
    });
    NameServerConfig::new(address.ip(), true, connections.into())
}

/// Asks for everything that is wanted of a name; tells also for how long the shortest-lived answer holds.
async fn ask(resolver: &TokioResolver, settings: &DnsSettings) -> (Vec<Outcome>, Duration) {
    let mut life = Duration::MAX;
    if let Some(srv) = &settings.srv {
        let outcome = ask_services(resolver, srv, &mut life).await;
        return (vec![outcome], life);
    }
    let name = settings.name.clone().unwrap_or_default();
    let port = settings.port.unwrap_or_default();
    let (v4, v6) = tokio::join!(
        resolver.ipv4_lookup(name.as_str()),
        resolver.ipv6_lookup(name.as_str())
    );
    let outcomes = [v4, v6].map(|answer| {
        outcome(answer, &mut life, |lookup| {
            addresses(lookup)
                .map(|address| Place {
                    id: HostPort::new(&address.to_string(), port).to_string(),
                    address,
                    port,
                    instance: String::new(),
                })
                .collect()
        })
    });
    (outcomes.into(), life)
}

/// Asks for services and for where each of their hosts is.
async fn ask_services(resolver: &TokioResolver, srv: &str, life: &mut Duration) -> Outcome {
    let lookup = match resolver.srv_lookup(srv).await {
        Ok(lookup) => lookup,
        Err(error) => return outcome(Err(error), life, |_| BTreeSet::new()),
    };
    shorten(life, &lookup);
    let services: Vec<SRV> = lookup
        .answers()
        .iter()
        .filter_map(|record| match &record.data {
            RData::SRV(service) => Some(service.clone()),
            _ => None,
        })
        // One that is "." says that there is no such service.
        .filter(|service| !service.target.is_root())
        .take(MAX_PLACES + 1)
        .collect();
    let mut asking = tokio::task::JoinSet::new();
    for service in services {
        let known = lookup.additionals().iter().filter(|record| {
            record.name == service.target && matches!(record.data, RData::A(_) | RData::AAAA(_))
        });
        let known = known.filter_map(|record| record.data.ip_addr()).min();
        let resolver = resolver.clone();
        asking.spawn(async move {
            let address = match known {
                Some(address) => Ok((address, Duration::MAX)),
                None => host_address(&resolver, &service).await,
            };
            (service, address)
        });
    }
    let mut places = BTreeSet::new();
    while let Some(joined) = asking.join_next().await {
        let Ok((service, address)) = joined else {
            continue;
        };
        let host = service.target.to_ascii();
        let host = host.trim_end_matches('.');
        match address {
            Ok((address, holds)) => {
                *life = (*life).min(holds);
                places.insert(Place {
                    id: HostPort::new(host, service.port).to_string(),
                    address,
                    port: service.port,
                    instance: address.to_string(),
                });
            }
            // Without the whole list, those that are missing would be taken for gone.
            Err(error) => return Outcome::Failed(format!("{host}: {error}")),
        }
    }
    Outcome::Found(places)
}

/// Finds one address of a service's host, the same each time.
async fn host_address(
    resolver: &TokioResolver,
    service: &SRV,
) -> Result<(IpAddr, Duration), NetError> {
    let mut life = Duration::MAX;
    let mut found = None;
    for kind in [RecordType::A, RecordType::AAAA] {
        match resolver.lookup(service.target.clone(), kind).await {
            Ok(lookup) => {
                shorten(&mut life, &lookup);
                found = addresses(&lookup).min();
            }
            Err(error) if error.is_no_records_found() && kind == RecordType::A => {}
            Err(error) => return Err(error),
        }
        if let Some(address) = found {
            return Ok((address, life));
        }
    }
    Err(NetError::Message("the host has no address"))
}

fn outcome(
    answer: Result<Lookup, NetError>,
    life: &mut Duration,
    read: impl FnOnce(&Lookup) -> BTreeSet<Place>,
) -> Outcome {
    match answer {
        Ok(lookup) => {
            shorten(life, &lookup);
            Outcome::Found(read(&lookup))
        }
        Err(error) if error.is_no_records_found() => Outcome::Found(BTreeSet::new()),
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

fn shorten(life: &mut Duration, lookup: &Lookup) {
    let left = lookup
        .valid_until()
        .saturating_duration_since(Instant::now());
    *life = (*life).min(left);
}

fn addresses(lookup: &Lookup) -> impl Iterator<Item = IpAddr> {
    let records = lookup.answers().iter();
    records
        .filter_map(|record| record.data.ip_addr())
        .take(MAX_PLACES + 1)
}

fn sightings(settings: &DnsSettings, places: &BTreeSet<Place>) -> Result<Vec<Sighting>, String> {
    if places.len() > MAX_PLACES {
        return Err(format!("more than {MAX_PLACES} workers are not accepted"));
    }
    let sighting = |place: &Place| {
        let mut worker = settings.worker(&place.address.to_string(), place.port)?;
        worker.id = WorkerId::new(&place.id).map_err(|error| error.to_string())?;
        Ok(Sighting {
            worker,
            instance: place.instance.clone(),
            phase: Phase::Serving,
        })
    };
    places.iter().map(sighting).collect()
}
