//! Which workers can hand over to each other, over which link, and how.
//!
//! Engines refuse each other unless version, model and connector are the same, after both legs have begun. So workers are
//! planned in groups of those that agree, and a pair across groups is named in the plan with what differs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvlane::WorkerRank;
use kvlane::handoff::{LinkId, PlanWorker};

use super::Protocol;
use super::connector::{Connector, ProtocolChoice};
use super::links::Links;
use super::nixl::lease_of;
use super::peers::{Peer, PeerFacts, Peers};
use crate::fleet::{Members, Worker};

/// What is configured of pairs.
#[derive(Clone, Copy, Debug)]
pub struct PairingRules {
    /// Which connector workers are taken to have.
    pub protocol: ProtocolChoice,
    /// For how long a prefill worker holds what nobody fetches; `None` takes what its version does.
    pub lease: Option<Duration>,
}

/// Knows what workers have in common.
#[derive(Debug)]
pub struct Pairing {
    rules: PairingRules,
    links: Links,
    peers: Peers,
}

/// How one pair hands over.
#[derive(Debug)]
pub struct PairTerms {
    /// What is written to both.
    pub protocol: Arc<dyn Protocol>,
    /// For how long the prefill worker holds what nobody fetches.
    pub lease: Duration,
    /// The decode worker can process a prompt itself.
    pub may_fall_back: bool,
    /// Port of the prefill worker's bootstrap service.
    pub bootstrap_port: u16,
    /// Engine id of the prefill rank, where the protocol needs it beforehand and it is known.
    pub prefill_engine: Option<String>,
    /// What these terms rest on.
    pub peer: Option<Arc<Peer>>,
}

/// The workers of one plan, with what each was said to be.
#[derive(Debug)]
pub struct Known {
    /// What workers take whose engines say nothing.
    silent: Connector,
}

impl Pairing {
    /// Creates a pairing.
    #[must_use]
    pub const fn new(rules: PairingRules, links: Links, peers: Peers) -> Self {
        Self {
            rules,
            links,
            peers,
        }
    }

    /// Looks at who is there. A worker whose engine does not tell its connector is taken to have that of the others, when
    /// those agree, and else NIXL.
    #[must_use]
    pub fn know(&self, members: &Members) -> Known {
        let mut told: Vec<Connector> = members
            .list()
            .iter()
            .filter_map(|worker| self.peers.of(worker)?.facts().connector)
            .collect();
        told.dedup();
        let one = told
            .first()
            .filter(|first| told.iter().all(|other| other == *first));
        Known {
            silent: one.copied().unwrap_or(Connector::Nixl),
        }
    }

    fn connector(&self, known: &Known, facts: &PeerFacts) -> Connector {
        let fixed = self.rules.protocol.fixed();
        fixed.or(facts.connector).unwrap_or(known.silent)
    }

    /// Adds to a worker of a plan what it must have in common with others.
    #[must_use]
    pub fn describe(
        &self,
        known: &Known,
        worker: &Arc<Worker>,
        mut plan: PlanWorker,
    ) -> PlanWorker {
        let labels = worker.labels();
        if let Some(device) = labels.get("device") {
            plan = plan.device(device);
        }
        // One that was not asked yet is in a group of its own.
        let Some(peer) = self.peers.of(worker) else {
            return plan.group(&format!("{}: not asked yet", worker.id()));
        };
        let connector = self.connector(known, peer.facts());
        let alone = plan.serves_alone;
        let decoder = worker.role() == kvlane::Role::Decode;
        plan = plan.serves_alone(alone && (!decoder || connector.decoder_serves_alone()));
        plan.group(&group(&labels, peer.facts(), connector))
    }

    /// Tells whether a worker can serve a request that is not split.
    #[must_use]
    pub fn serves_alone(&self, known: &Known, worker: &Arc<Worker>) -> bool {
        if worker.role() != kvlane::Role::Decode {
            return true;
        }
        let peer = self.peers.of(worker);
        let connector = match &peer {
            Some(peer) => self.connector(known, peer.facts()),
            None => self.connector(known, &PeerFacts::default()),
        };
        connector.decoder_serves_alone()
    }

    /// Returns the link between two workers.
    #[must_use]
    pub fn link(&self, prefill: &Worker, decode: &Worker) -> LinkId {
        let (from, to) = (prefill.labels(), decode.labels());
        self.links.between(host(prefill, &from), host(decode, &to))
    }

    /// Returns how a pair hands over; `None` where too little is known of the prefill worker.
    #[must_use]
    pub fn terms(
        &self,
        known: &Known,
        worker: &Arc<Worker>,
        prefill: &WorkerRank,
    ) -> Option<PairTerms> {
        let peer = self.peers.of(worker)?;
        let facts = peer.facts();
        let connector = self.connector(known, facts);
        let engine = facts.engines.get(&prefill.dp_rank).cloned();
        if connector == Connector::Mooncake && engine.is_none() {
            peer.doubt();
            return None;
        }
        let labels = worker.labels();
        let version = version(&labels, facts).unwrap_or_default();
        let lease = self.rules.lease.unwrap_or_else(|| lease_of(version));
        Some(PairTerms {
            protocol: connector.protocol(lease),
            lease,
            may_fall_back: connector.decoder_serves_alone(),
            bootstrap_port: self.peers.bootstrap_port(worker, facts),
            prefill_engine: engine,
            peer: Some(Arc::clone(&peer)),
        })
    }

    /// Tells whether the workers that were there at first have been asked; see [`Peers::are_settled`].
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.peers.are_settled()
    }

    /// Returns what is known of each worker, for reports.
    #[must_use]
    pub fn report(&self, members: &Members) -> Vec<serde_json::Value> {
        let known = self.know(members);
        let describe = |worker: &Arc<Worker>| {
            let peer = self.peers.of(worker)?;
            let connector = self.connector(&known, peer.facts());
            let labels = worker.labels();
            Some(serde_json::json!({
                "worker": worker.id(), "host": host(worker, &labels), "group": group(&labels, peer.facts(), connector),
                "told": **peer.facts(),
            }))
        };
        members.list().iter().filter_map(describe).collect()
    }
}

type Labels = BTreeMap<String, String>;

/// Names what must be the same on both sides.
fn group(labels: &Labels, facts: &PeerFacts, connector: Connector) -> String {
    let version = version(labels, facts).unwrap_or("unknown version");
    let mut models = facts.models.clone();
    // vLLM's NIXL compares what its model was started as.
    let model = facts.model.clone().filter(|model| !models.contains(model));
    models.extend(model.filter(|_| connector == Connector::Nixl));
    format!("{}, {version}, {}", models.join(" "), connector.as_str())
}

/// Returns the version of an engine, as far as a label or the engine tells.
fn version<'a>(labels: &'a Labels, facts: &'a PeerFacts) -> Option<&'a str> {
    let label = labels.get("version");
    label.or(facts.version.as_ref()).map(String::as_str)
}

/// Returns the host that shares its ports: the label `host`, or that of the URL.
fn host<'a>(worker: &'a Worker, labels: &'a Labels) -> &'a str {
    let label = labels.get("host");
    label.map_or_else(|| worker.config.url.address().host(), String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_what_engines_compare() {
        let facts = |model: &str, version: &str| PeerFacts {
            version: Some(version.to_owned()),
            models: vec!["m".to_owned()],
            model: Some(model.to_owned()),
            ..PeerFacts::default()
        };
        let named = |facts: &PeerFacts, connector| group(&Labels::new(), facts, connector);
        let of = |model, version, connector| named(&facts(model, version), connector);
        assert_eq!(of("/a/m", "1", Connector::Nixl), "m /a/m, 1, nixl");
        assert_eq!(of("m", "1", Connector::Nixl), "m, 1, nixl");
        // They do not ask where the other has its model from.
        assert_eq!(of("/a/m", "1", Connector::Mooncake), "m, 1, mooncake");
        assert_eq!(of("/b/m", "2", Connector::Sglang), "m, 2, sglang");
        let silent = PeerFacts::default();
        assert_eq!(named(&silent, Connector::Nixl), ", unknown version, nixl");
        let labels = Labels::from([("version".to_owned(), "3".to_owned())]);
        let labelled = group(&labels, &facts("m", "1"), Connector::Nixl);
        assert_eq!(labelled, "m, 3, nixl");
    }
}
