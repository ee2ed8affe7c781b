//! Choosing a worker. Every policy books through the router, so that loads and metrics mean the same under all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvlane::{ErrorKind, RequestGuard, Router, SelectRequest, WorkerId};
use parking_lot::Mutex;

use crate::config::PolicyKind;
use crate::fleet::{Members, Worker};

/// Chooses and books.
#[derive(Debug)]
pub(crate) struct Chooser {
    kind: PolicyKind,
    router: Arc<Router>,
    turn: AtomicUsize,
    random: Mutex<fastrand::Rng>,
}

/// A target that a policy may choose: a worker and, when it has several, a rank.
type Target<'a> = (&'a Arc<Worker>, u32);

impl Chooser {
    pub(crate) fn new(kind: PolicyKind, router: Arc<Router>) -> Self {
        let seed = router.config().seed;
        Self {
            kind,
            router,
            turn: AtomicUsize::new(0),
            random: Mutex::new(seed.map_or_else(fastrand::Rng::new, fastrand::Rng::with_seed)),
        }
    }

    /// Books one worker for the request; `None` when no worker is eligible.
    pub(crate) fn choose(
        &self,
        members: &Members,
        request: &SelectRequest<'_>,
        now: Instant,
    ) -> kvlane::Result<Option<RequestGuard>> {
        if self.kind == PolicyKind::Kv {
            return self.router.select(request, now);
        }
        let mut targets = eligible(members, request.allowed);
        while let Some((worker, dp_rank)) = self.pick(&targets) {
            match self.router.book(worker.id(), Some(dp_rank), request, now) {
                // Removed since the list was taken: the others are still there.
                Err(error) if error.kind() == ErrorKind::UnknownWorker => {
                    targets.retain(|(other, _)| other.id() != worker.id());
                }
                booked => return booked.map(Some),
            }
        }
        Ok(None)
    }

    fn pick<'a>(&self, targets: &[Target<'a>]) -> Option<Target<'a>> {
        if targets.is_empty() {
            return None;
        }
        let index = match self.kind {
            PolicyKind::Random => self.random.lock().usize(..targets.len()),
            PolicyKind::LeastLoaded => self.least_loaded(targets),
            PolicyKind::RoundRobin | PolicyKind::Kv => {
                self.turn.fetch_add(1, Ordering::Relaxed) % targets.len()
            }
        };
        Some(targets[index])
    }

    /// Returns the target with the fewest requests in flight; ties are drawn.
    fn least_loaded(&self, targets: &[Target<'_>]) -> usize {
        // Read once: requests come and go meanwhile, and a second reading may equal the least of the first nowhere.
        let loads: Vec<usize> = targets
            .iter()
            .map(|(worker, _)| worker.in_flight() / worker.config.dp_ranks as usize)
            .collect();
        let least = loads.iter().min().copied().unwrap_or(0);
        let tied: Vec<_> = (0..targets.len())
            .filter(|index| loads[*index] == least)
            .collect();
        tied[self.random.lock().usize(..tied.len())]
    }
}

fn eligible<'a>(members: &'a Members, allowed: Option<&[WorkerId]>) -> Vec<Target<'a>> {
    members
        .list()
        .iter()
        .filter(|worker| worker.is_eligible())
        .filter(|worker| allowed.is_none_or(|allowed| allowed.contains(&worker.config.id)))
        .flat_map(|worker| (0..worker.config.dp_ranks).map(move |dp_rank| (worker, dp_rank)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    use kvlane::{BlockSize, Prompt, RouterConfig, SaltContext};

    use super::*;
    use crate::config::{Config, WorkerConfig};
    use crate::fleet::Fleet;
    use crate::metrics::Metrics;

    fn fleet(ids: &[&str]) -> (Arc<Router>, Fleet) {
        let router = Arc::new(Router::new(RouterConfig::default()).unwrap());
        let settings = Arc::new(Config::default());
        let fleet = Fleet::new(settings, Arc::clone(&router), Arc::new(Metrics::new()));
        for id in ids {
            let config = WorkerConfig::new(id, "http://127.0.0.1:9").unwrap();
            fleet.add(config, Instant::now()).unwrap();
        }
        (router, fleet)
    }

    fn prompt() -> Prompt {
        Prompt::from_tokens(&[], BlockSize::default(), &SaltContext::default())
    }

    #[test]
    fn a_worker_removed_meanwhile_is_passed_over() {
        for kind in PolicyKind::ALL {
            let (router, fleet) = fleet(&["w1", "w2", "w3"]);
            let before = fleet.members();
            fleet.remove("w1").unwrap();
            let prompt = prompt();
            let request = SelectRequest::new(&prompt);
            let chooser = Chooser::new(kind, router);
            for _ in 0..20 {
                let guard = chooser.choose(&before, &request, Instant::now());
                assert_ne!(guard.unwrap().unwrap().worker(), "w1", "{kind:?}");
            }
            fleet.remove("w2").unwrap();
            fleet.remove("w3").unwrap();
            let none = chooser.choose(&before, &request, Instant::now());
            assert!(none.unwrap().is_none(), "{kind:?}");
        }
    }

    #[test]
    fn loads_may_change_while_the_least_is_sought() {
        let (router, fleet) = fleet(&["w1"]);
        let members = fleet.members();
        let chooser = Chooser::new(PolicyKind::LeastLoaded, router);
        let done = AtomicBool::new(false);
        let ready = Barrier::new(3);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    ready.wait();
                    while !done.load(Ordering::Relaxed) {
                        drop(members.list()[0].enter());
                    }
                });
            }
            let targets = eligible(&members, None);
            ready.wait();
            let picked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                (0..200_000).all(|_| chooser.pick(&targets).is_some())
            }));
            done.store(true, Ordering::Relaxed);
            assert!(picked.is_ok_and(|all| all));
        });
    }
}
