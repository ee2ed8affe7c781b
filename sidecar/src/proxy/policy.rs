//! Choosing a worker. Every policy books through the router, so that loads and metrics mean the same under all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvlane::{RequestGuard, Router, SelectRequest, WorkerId};
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
        let targets = eligible(members, request.allowed);
        let Some((worker, dp_rank)) = self.pick(&targets) else {
            return Ok(None);
        };
        self.router
            .book(worker.id(), Some(dp_rank), request, now)
            .map(Some)
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
        let load = |(worker, _): &Target<'_>| worker.in_flight() / worker.config.dp_ranks as usize;
        let least = targets.iter().map(load).min().unwrap_or(0);
        let tied: Vec<_> = (0..targets.len())
            .filter(|index| load(&targets[*index]) == least)
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
