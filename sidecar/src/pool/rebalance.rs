//! Watches the pool, lets the planner propose, and carries out what it proposes.
//!
//! Roles change in place: a worker keeps its cache and finishes what it has. Workers are started and stopped by
//! [levers](Lever): the engines of this machine, or a scale in Kubernetes. A role without a lever is balanced by whoever reads
//! the metric `kvlane_pool_desired_workers`, such as a horizontal autoscaler.

mod sample;
mod scale;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvlane::{Role, WorkerId};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tracing::{info, warn};

use super::planner::{
    MemberState, Planner, PlannerMode, PoolMember, PoolPlan, PoolSample, Proposal, RolePlan,
};
use super::process::Processes;
use crate::app::App;
use crate::config::{ConfigError, PlannerSettings, seconds};

pub use sample::{FLIPPABLE, Sampler, Seen};
pub use scale::ScaleLever;

/// What starts and stops workers of some roles.
pub trait Lever: Send + Sync + fmt::Debug {
    /// Tells whether it can start workers of a role.
    fn starts(&self, role: Role) -> bool;

    /// Tells whether it can stop a worker.
    fn stops(&self, role: Role, worker: &str) -> bool;

    /// Returns the workers that it is about to bring, whether or not the pool knows of them yet.
    fn coming(&self) -> Vec<(WorkerId, Role)> {
        Vec::new()
    }

    /// Tells whether it chooses by itself which worker it stops.
    fn chooses(&self) -> bool {
        false
    }

    /// Starts workers, of a role that the pool sees `current` of, those on their way included.
    fn start(&self, role: Role, count: u32, current: u32) -> Pull<'_>;

    /// Stops a worker that has finished what it had; one that chooses by itself stops any of the role.
    fn stop<'a>(&'a self, role: Role, worker: &'a str) -> Pull<'a>;
}

/// What came of pulling a lever: what was done, or why it was not.
pub type Pull<'a> = Pin<Box<dyn Future<Output = Result<String, String>> + Send + 'a>>;

/// Balances a pool.
#[derive(Debug)]
pub struct Rebalancer {
    settings: PlannerSettings,
    levers: Vec<Arc<dyn Lever>>,
    board: Mutex<Board>,
}

/// What is shown.
#[derive(Debug, Default)]
struct Board {
    roles: Vec<RolePlan>,
    actions: VecDeque<Action>,
    counts: Proposals,
}

/// Numbers of proposals since the start, by kind and role.
type Proposals = BTreeMap<(&'static str, &'static str), u64>;

/// What the metrics show.
#[derive(Debug, Default)]
pub struct Balance {
    /// The sizes of the last plan.
    pub roles: Vec<RolePlan>,
    /// Numbers of proposals since the start, by kind and role.
    pub proposals: BTreeMap<(&'static str, &'static str), u64>,
}

/// A proposal and what came of it.
#[derive(Clone, Debug, Serialize)]
struct Action {
    #[serde(skip)]
    at: Instant,
    proposal: Proposal,
    /// `dry run`, what was done, or why nothing was.
    outcome: String,
}

/// Actions that are kept to be looked at.
const KEPT_ACTIONS: usize = 32;

/// Time between two looks at the pool.
const LOOK: Duration = Duration::from_millis(250);

/// Starts balancing the pool, if the configuration asks for it.
///
/// # Errors
/// The cluster whose workloads are to be scaled is not known.
pub async fn start(app: &Arc<App>) -> Result<(), ConfigError> {
    let Some(settings) = &app.config.planner else {
        return Ok(());
    };
    let mut levers: Vec<Arc<dyn Lever>> = Vec::new();
    if let Some(processes) = app.processes.get() {
        levers.push(Arc::<Processes>::clone(processes));
    }
    levers.extend(scale_lever(app, settings).await?);
    let rebalancer = Arc::new(Rebalancer::new(settings.clone(), levers));
    if app.rebalancer.set(Arc::clone(&rebalancer)).is_ok() {
        app.spawn(rebalancer.run(Arc::clone(app)));
    }
    Ok(())
}

/// Finds the cluster of the workloads: that of the first Kubernetes source, or the one that every client finds.
#[cfg(feature = "kubernetes")]
async fn scale_lever(
    app: &App,
    settings: &PlannerSettings,
) -> Result<Option<Arc<dyn Lever>>, ConfigError> {
    use super::discovery::kubernetes::{Cluster, KubernetesScaler};
    if settings.scale.is_empty() {
        return Ok(None);
    }
    let of = app.config.discovery.kubernetes.first().cloned();
    let cluster = Cluster::find(&of.unwrap_or_default()).await;
    let cluster = cluster.map_err(|why| ConfigError(format!("planner.scale: {why}")))?;
    let scaler = Arc::new(KubernetesScaler::new(cluster, false));
    let lever = ScaleLever::new(scaler, settings.scale.clone());
    Ok(Some(Arc::new(lever)))
}

/// Refused when the configuration was read.
#[cfg(not(feature = "kubernetes"))]
async fn scale_lever(_: &App, _: &PlannerSettings) -> Result<Option<Arc<dyn Lever>>, ConfigError> {
    Ok(None)
}

impl Rebalancer {
    /// Creates a rebalancer that has seen nothing.
    #[must_use]
    pub fn new(settings: PlannerSettings, levers: Vec<Arc<dyn Lever>>) -> Self {
        Self {
            settings,
            levers,
            board: Mutex::default(),
        }
    }

    /// Balances until the sidecar stops.
    pub async fn run(self: Arc<Self>, app: Arc<App>) {
        let mut planner = match Planner::new(self.settings.planner.clone()) {
            Ok(planner) => planner,
            // Checked when it was read.
            Err(error) => return warn!(cause = %error, "the pool is not balanced"),
        };
        let mut sampler = Sampler::new(self.settings.decode_streams);
        let interval = seconds(self.settings.interval_seconds);
        let between = LOOK.min(interval);
        let mut ticks = tokio::time::interval(between);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut due = Instant::now() + interval;
        loop {
            tokio::select! {
                () = app.stop().cancelled() => return,
                _ = ticks.tick() => {}
            }
            let now = Instant::now();
            sampler.look(sample::see(&app, now));
            if now < due {
                continue;
            }
            due = now + interval;
            let mut sample = sampler.take(between.as_secs_f64());
            self.add_coming(&mut sample);
            let plan = planner.plan(&sample, now);
            self.obey(&app, plan, now).await;
        }
    }

    /// Counts what is on its way, so that it is not started twice.
    fn add_coming(&self, sample: &mut PoolSample) {
        for (id, role) in self.levers.iter().flat_map(|lever| lever.coming()) {
            if sample.members.iter().all(|member| member.id != id) {
                sample.members.push(PoolMember {
                    id,
                    role,
                    flippable: false,
                    state: MemberState::Starting,
                    active_requests: 0,
                });
            }
        }
    }

    /// Returns the sizes of the last plan, and the number of proposals.
    #[must_use]
    pub fn balance(&self) -> Balance {
        let board = self.board.lock();
        Balance {
            roles: board.roles.clone(),
            proposals: board.counts.clone(),
        }
    }

    /// Describes the last plan and the last actions, the newest first.
    #[must_use]
    pub fn report(&self) -> Value {
        let board = self.board.lock();
        let actions = board.actions.iter().rev().map(|action| {
            let mut value = json!(action);
            value["seconds_ago"] = json!(action.at.elapsed().as_secs_f64());
            value
        });
        json!({
            "mode": self.settings.planner.mode,
            "roles": board.roles,
            "actions": actions.collect::<Vec<_>>(),
        })
    }

    async fn obey(&self, app: &Arc<App>, plan: PoolPlan, now: Instant) {
        self.board.lock().roles = plan.roles;
        for proposal in plan.proposals {
            let outcome = if plan.dry_run {
                Ok("dry run".to_owned())
            } else {
                self.carry_out(app, &proposal).await
            };
            let (kind, role) = kind_of(&proposal);
            match &outcome {
                Ok(outcome) => info!(kind, role, outcome, "the pool's planner proposed a change"),
                Err(why) => {
                    warn!(
                        kind,
                        role,
                        cause = why,
                        "what the pool's planner proposed was not done"
                    );
                }
            }
            let mut board = self.board.lock();
            *board.counts.entry((kind, role)).or_default() += 1;
            if board.actions.len() == KEPT_ACTIONS {
                board.actions.pop_front();
            }
            board.actions.push_back(Action {
                at: now,
                proposal,
                outcome: outcome.unwrap_or_else(|why| why),
            });
        }
        debug_assert!(self.settings.planner.mode == PlannerMode::Act || plan.dry_run);
    }

    async fn carry_out(&self, app: &Arc<App>, proposal: &Proposal) -> Result<String, String> {
        match proposal {
            Proposal::Flip { worker, to, .. } => app
                .set_role(worker.as_str(), *to)
                .map(|()| "role changed".to_owned())
                .map_err(|error| error.to_string()),
            Proposal::Start { role, count, .. } => {
                let lever = self.lever(*role, |lever| lever.starts(*role))?;
                let plans = self.board.lock().roles.clone();
                let plan = plans.iter().find(|plan| plan.role == *role);
                let current = plan.map_or(0, |plan| plan.current);
                lever.start(*role, *count, current).await
            }
            Proposal::Stop { worker, role } => {
                let worker = worker.as_str();
                let lever = self.lever(*role, |lever| lever.stops(*role, worker))?;
                if lever.chooses() {
                    lever.stop(*role, worker).await
                } else {
                    stop(app, Arc::clone(lever), worker, *role)
                }
            }
        }
    }

    fn lever(
        &self,
        role: Role,
        can: impl Fn(&dyn Lever) -> bool,
    ) -> Result<&Arc<dyn Lever>, String> {
        let lever = self.levers.iter().find(|lever| can(lever.as_ref()));
        lever.ok_or_else(|| {
            format!(
                "nothing starts or stops {} workers here: give processes of that role, a Kubernetes scale, or let an autoscaler read kvlane_pool_desired_workers",
                role.name()
            )
        })
    }
}

/// Drains a worker and then stops it; waiting for its requests must not hold up the next plan.
fn stop(app: &Arc<App>, lever: Arc<dyn Lever>, worker: &str, role: Role) -> Result<String, String> {
    app.drain_worker(worker, true)
        .map_err(|error| error.to_string())?;
    let (app, worker) = (Arc::clone(app), worker.to_owned());
    let drain = seconds(app.config.drain_seconds);
    let task = {
        let app = Arc::clone(&app);
        async move {
            let _ = tokio::time::timeout(drain, until_idle(&app, &worker)).await;
            match lever.stop(role, &worker).await {
                Ok(done) => info!(worker, done, "a worker that was not needed is stopped"),
                Err(why) => {
                    warn!(worker, cause = why, "a worker that is not needed goes on");
                    let _ = app.drain_worker(&worker, false);
                }
            }
        }
    };
    app.spawn(task);
    Ok("draining, then stopped".to_owned())
}

/// Waits until a worker has nothing in flight, or is gone.
async fn until_idle(app: &App, worker: &str) {
    loop {
        // Requests that were booked just before the drain began have been sent by then.
        tokio::time::sleep(LOOK).await;
        let members = app.fleet.members();
        if members
            .find(worker)
            .is_none_or(|worker| worker.in_flight() == 0)
        {
            return;
        }
    }
}

const fn kind_of(proposal: &Proposal) -> (&'static str, &'static str) {
    match proposal {
        Proposal::Flip { to, .. } => ("flip", to.name()),
        Proposal::Start { role, .. } => ("start", role.name()),
        Proposal::Stop { role, .. } => ("stop", role.name()),
    }
}
