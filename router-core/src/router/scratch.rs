//! Room to work in, one a thread, so that a decision allocates nothing but its answer.

use std::cell::RefCell;
use std::time::Instant;

use crate::ids::{Slot, WorkerId};
use crate::index::{Overlap, Overlaps, PrefixIndex};
use crate::load::active::Shared;
use crate::policy::pick::Fullness;
use crate::policy::price::{Columns, Depths};
use crate::prompt::{Prompt, PromptKind};

use super::state::Inner;
use super::table::Workers;

/// What is known of one prompt at every slot, and room to choose.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    confirmed: Overlaps,
    placed: Vec<u32>,
    shared: Shared,
    allowed: Vec<u32>,
    pub(super) costs: Vec<f64>,
    pub(super) equals: Vec<(usize, Fullness)>,
    /// Columns of a decision that nobody remembers.
    pub(super) spare: Columns,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Lends the calling thread's scratch.
pub(super) fn with_scratch<T>(act: impl FnOnce(&mut Scratch) -> T) -> T {
    let mut act = Some(act);
    let lent = SCRATCH.try_with(|scratch| {
        let mut scratch = scratch.try_borrow_mut().ok()?;
        act.take().map(|act| act(&mut scratch))
    });
    match (lent, act) {
        (Ok(Some(result)), _) => result,
        // A thread that is ending has no locals any more.
        (_, Some(act)) => act(&mut Scratch::default()),
        (_, None) => unreachable!("the scratch was lent, so there is a result"),
    }
}

impl Scratch {
    pub(super) fn depths(&self) -> Depths<'_> {
        let device = self.confirmed.device();
        Depths {
            confirmed: device.unwrap_or_default(),
            tiers: device.is_none().then_some(&self.confirmed),
            placed: &self.placed,
            shared: &self.shared,
            allowed: &self.allowed,
        }
    }

    /// Takes in the slots of the workers that a request lists.
    pub(super) fn allow(&mut self, workers: &Workers, allowed: Option<&[WorkerId]>) {
        self.allowed.clear();
        let listed = allowed.unwrap_or_default().iter();
        let targets = listed
            .filter_map(|id| workers.by_id.get(id))
            .flat_map(|worker| worker.targets.iter());
        self.allowed.extend(targets.map(|target| target.slot.0));
    }

    /// Confirmed and placed blocks, merged by maximum.
    pub(super) fn merged(&self, slot: Slot) -> Overlap {
        let mut overlap = self.confirmed.get(slot);
        let placed = self.placed.get(slot.index()).copied().unwrap_or(0);
        overlap.device += placed.saturating_sub(overlap.blocks());
        overlap
    }
}

impl Inner {
    /// Looks a prompt up in everything that is known about caches.
    pub(super) fn look_up_blocks(&self, prompt: &Prompt, now: Instant, scratch: &mut Scratch) {
        let confirmed = &mut scratch.confirmed;
        if prompt.kind() == PromptKind::Tokens {
            self.index.overlap(prompt.local(), confirmed);
        } else {
            confirmed.reset(0);
        }
        self.placements(prompt.kind())
            .overlap(prompt.local(), now, &mut scratch.placed);
    }

    /// Looks a prompt up in caches and among the active requests of the first `slots` slots.
    pub(super) fn look_up(&self, prompt: &Prompt, slots: usize, now: Instant, at: &mut Scratch) {
        self.look_up_blocks(prompt, now, at);
        self.active.look_up(prompt.local(), slots, &mut at.shared);
    }
}
