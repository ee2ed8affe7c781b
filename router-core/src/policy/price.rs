//! Prices every target at once, over dense columns by slot, which are also what a decision keeps to explain itself.

use std::ops::Range;

use crate::ids::{Role, Slot};
use crate::index::{Overlap, Overlaps};
use crate::load::Load;
use crate::load::active::Shared;
use crate::load::row::{Row, WHOLE, flag, share};

use super::cost::{CostBreakdown, CostInputs, CostWeights, cost};
use super::pick::cheapest;

/// What a request asks of every target, and what it is priced by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) weights: CostWeights,
    /// Complete blocks of the prompt, and of all prompts of a batch.
    pub(crate) request_blocks: u32,
    /// Distinct blocks that a target gains when it shares none of them.
    pub(crate) grown_blocks: u32,
    /// A target that is preferred, and by which factor.
    pub(crate) preferred: Option<(Slot, f64)>,
    /// Flags that are looked at, and how they must be.
    pub(crate) flags: Flags,
}

/// Which flags a target must have and which not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags {
    looked_at: u32,
    wanted: u32,
}

impl Flags {
    /// Any registered target, whatever its state.
    pub(crate) const fn any() -> Self {
        Self {
            looked_at: flag::PRESENT,
            wanted: flag::PRESENT,
        }
    }

    /// A target that can take a request with these filters.
    pub(crate) fn eligible(role: Option<Role>, dp_rank: Option<u32>, is_listed: bool) -> Self {
        let mut wanted = flag::PRESENT;
        let mut looked_at = flag::PRESENT | flag::DRAINING | flag::UNAVAILABLE;
        if let Some(role) = role {
            wanted |= flag::to_serve(role);
        }
        if is_listed {
            wanted |= flag::ALLOWED;
        }
        looked_at |= wanted;
        if let Some(dp_rank) = dp_rank {
            looked_at |= flag::RANK;
            wanted |= flag::of_rank(dp_rank.min(flag::NO_RANK));
        }
        Self { looked_at, wanted }
    }

    #[inline]
    const fn are(self, flags: u32) -> bool {
        flags & self.looked_at == self.wanted
    }
}

/// What is known of a prompt at every slot, by source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depths<'a> {
    /// Leading blocks that events confirm on the device; slots beyond the end hold none.
    pub(crate) confirmed: &'a [u32],
    /// The same by tier, where a lower tier takes part.
    pub(crate) tiers: Option<&'a Overlaps>,
    /// Leading blocks by own placements.
    pub(crate) placed: &'a [u32],
    pub(crate) shared: &'a Shared,
    /// Slots that the request lists.
    pub(crate) allowed: &'a [u32],
}

/// Every target of a range of slots as one decision saw it: 36 bytes each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Columns {
    first: usize,
    slots: usize,
    /// Columns of `slots` counts each, in the order of [`Column`].
    counts: Vec<u32>,
    /// Booked prefill, less what is of the request's own prefix.
    prefill: Vec<f64>,
    /// Overlaps by tier, where a lower tier takes part; they replace the confirmed column.
    tiers: Vec<Overlap>,
}

/// Columns of counts.
#[derive(Clone, Copy, Debug)]
enum Column {
    Confirmed,
    Placed,
    Shared,
    Requests,
    Blocks,
    Fidelity,
    Flags,
}

const COLUMNS: usize = 7;
/// Slots that are taken in and priced at once, while their columns are in the nearest cache.
const AT_ONCE: usize = 256;

impl Columns {
    /// Takes in `slots` slots from `first` on, as far as `rows` has them, and prices them: those that are no candidates cost
    /// infinity. Returns the lowest cost.
    pub(crate) fn take_in<'a>(
        &mut self,
        (first, slots): (usize, usize),
        rows: impl Iterator<Item = &'a [Row]>,
        depths: &Depths<'_>,
        ask: &Ask,
        costs: &mut Vec<f64>,
    ) -> f64 {
        (self.first, self.slots) = (first, slots);
        // Every place is written below.
        self.counts.resize(COLUMNS * slots, 0);
        self.prefill.resize(slots, 0.0);
        costs.resize(slots, 0.0);
        self.fill_depths(depths);
        let (mut at, mut skip, mut lowest) = (0, first, f64::INFINITY);
        for piece in rows {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            let piece = &piece[skipped..];
            for piece in piece[..piece.len().min(slots - at)].chunks(AT_ONCE) {
                let end = at + piece.len();
                self.fill_rows(at, piece);
                self.adjust(at..end, depths);
                self.price(at..end, ask, &mut costs[at..end]);
                lowest = lowest.min(cheapest(&costs[at..end]));
                at = end;
            }
        }
        // Slots without a row have no target.
        self.column_mut(Column::Flags)[at..].fill(0);
        costs[at..].fill(f64::INFINITY);
        lowest
    }

    fn fill_depths(&mut self, depths: &Depths<'_>) {
        let (first, slots) = (self.first, self.slots);
        for (column, values) in [
            (Column::Confirmed, depths.confirmed),
            (Column::Placed, depths.placed),
            (Column::Shared, &depths.shared.blocks),
        ] {
            let values = values.get(first..).unwrap_or_default();
            let known = values.len().min(slots);
            let (held, none) = self.column_mut(column).split_at_mut(known);
            held.copy_from_slice(&values[..known]);
            none.fill(0);
        }
        self.tiers.clear();
        if let Some(tiers) = depths.tiers {
            let slots = (first..first + slots).map(slot);
            self.tiers.extend(slots.map(|slot| tiers.get(slot)));
        }
    }

    fn fill_rows(&mut self, at: usize, rows: &[Row]) {
        let (slots, end) = (self.slots, at + rows.len());
        let (_, counts) = self.counts.split_at_mut(Column::Requests as usize * slots);
        let (requests, counts) = counts.split_at_mut(slots);
        let (blocks, counts) = counts.split_at_mut(slots);
        let (fidelity, flags) = counts.split_at_mut(slots);
        let counts = requests[at..end].iter_mut().zip(&mut blocks[at..end]);
        let states = fidelity[at..end].iter_mut().zip(&mut flags[at..end]);
        let columns = counts.zip(states).zip(&mut self.prefill[at..end]);
        for (row, (((requests, blocks), (fidelity, flags)), prefill)) in rows.iter().zip(columns) {
            let seen = row.seen();
            *requests = seen.requests;
            *blocks = seen.blocks;
            *fidelity = seen.fidelity;
            *flags = seen.flags;
            *prefill = seen.prefill;
        }
    }

    /// Takes off the prefill of the request's own prefix, and marks the slots that the request lists.
    fn adjust(&mut self, range: Range<usize>, depths: &Depths<'_>) {
        let first = self.first;
        let within = |slot: &u32| {
            let at = (*slot as usize).checked_sub(first)?;
            range.contains(&at).then_some(at)
        };
        for slot in &depths.shared.prefill_slots {
            if let Some(at) = within(slot) {
                let booked = &mut self.prefill[at];
                *booked -= depths.shared.prefill(*slot).min(*booked);
            }
        }
        for at in depths.allowed.iter().filter_map(within) {
            self.column_mut(Column::Flags)[at] |= flag::ALLOWED;
        }
    }

    fn price(&self, range: Range<usize>, ask: &Ask, costs: &mut [f64]) {
        if !self.tiers.is_empty() {
            for (at, cost) in range.zip(costs) {
                *cost = match self.is_candidate(at, ask) {
                    true => self.breakdown(at, ask).total,
                    false => f64::INFINITY,
                };
            }
            return;
        }
        self.price_device(range.clone(), ask, costs);
        if let Some((slot, preference)) = ask.preferred
            && let Some(at) = self.position(slot).filter(|at| range.contains(at))
        {
            costs[at - range.start] *= preference;
        }
    }

    /// The same as [`breakdown`](Self::breakdown), for prompts on devices alone, over a range of slots.
    fn price_device(&self, range: Range<usize>, ask: &Ask, costs: &mut [f64]) {
        let slots = range.len();
        let costs = &mut costs[..slots];
        let column = |column| &self.column(column)[range.clone()][..slots];
        let (confirmed, placed) = (column(Column::Confirmed), column(Column::Placed));
        let (shared, requests) = (column(Column::Shared), column(Column::Requests));
        let (blocks, fidelity) = (column(Column::Blocks), column(Column::Fidelity));
        let (flags, prefill) = (column(Column::Flags), &self.prefill[range.clone()][..slots]);
        let (request, grown) = (f64::from(ask.request_blocks), f64::from(ask.grown_blocks));
        for at in 0..slots {
            let depth = confirmed[at].max(placed[at]);
            let credit = ask.weights.device_hit_credit * number(depth) * share_of(fidelity[at]);
            let uncached = request - credit;
            let uncached = if uncached > 0.0 { uncached } else { 0.0 };
            let decode = number(blocks[at]) + (grown - number(shared[at]));
            let sum = ask
                .weights
                .sum(uncached + prefill[at], decode, number(requests[at]));
            costs[at] = if ask.flags.are(flags[at]) {
                sum
            } else {
                f64::INFINITY
            };
        }
    }

    /// Returns how many slots it covers.
    pub(crate) const fn slots(&self) -> usize {
        self.slots
    }

    /// Lists the slots that are candidates.
    pub(crate) fn candidates(&self, ask: &Ask) -> impl Iterator<Item = Slot> {
        let candidates = (0..self.slots).filter(|at| self.is_candidate(*at, ask));
        candidates.map(|at| slot(self.first + at))
    }

    /// Returns the slot at a position of the costs.
    pub(crate) fn slot(&self, at: usize) -> Slot {
        slot(self.first + at)
    }

    /// Returns what the decision saw of a slot.
    pub(crate) fn quote(&self, slot: Slot, ask: &Ask) -> Option<Quote> {
        let at = self.position(slot)?;
        let overlap = self.confirmed(at);
        Some(Quote {
            overlap,
            predicted_blocks: self
                .count(Column::Placed, at)
                .saturating_sub(overlap.blocks()),
            fidelity: share(self.count(Column::Fidelity, at)),
            flags: self.count(Column::Flags, at),
            cost: self.breakdown(at, ask),
        })
    }

    fn breakdown(&self, at: usize, ask: &Ask) -> CostBreakdown {
        let mut overlap = self.confirmed(at);
        overlap.device += self
            .count(Column::Placed, at)
            .saturating_sub(overlap.blocks());
        let preference = match ask.preferred {
            Some((preferred, factor)) if preferred == self.slot(at) => factor,
            _ => 1.0,
        };
        let blocks = f64::from(self.count(Column::Blocks, at));
        let shared = f64::from(self.count(Column::Shared, at));
        let inputs = CostInputs {
            request_blocks: ask.request_blocks,
            overlap,
            fidelity: share(self.count(Column::Fidelity, at)),
            load: Load {
                active_requests: self.count(Column::Requests, at) as usize,
                active_blocks: blocks,
                prefill_blocks: self.prefill[at],
            },
            decode_blocks: blocks + (f64::from(ask.grown_blocks) - shared),
            preference,
        };
        // An overlap is a part of the request, so there is a cost.
        cost(&ask.weights, &inputs).unwrap_or_default()
    }

    fn confirmed(&self, at: usize) -> Overlap {
        self.tiers.get(at).copied().unwrap_or_else(|| Overlap {
            device: self.count(Column::Confirmed, at),
            ..Overlap::default()
        })
    }

    fn is_candidate(&self, at: usize, ask: &Ask) -> bool {
        ask.flags.are(self.count(Column::Flags, at))
    }

    fn position(&self, slot: Slot) -> Option<usize> {
        let at = slot.index().checked_sub(self.first)?;
        (at < self.slots).then_some(at)
    }

    fn count(&self, column: Column, at: usize) -> u32 {
        self.column(column)[at]
    }

    fn column(&self, column: Column) -> &[u32] {
        &self.counts[column as usize * self.slots..][..self.slots]
    }

    fn column_mut(&mut self, column: Column) -> &mut [u32] {
        &mut self.counts[column as usize * self.slots..][..self.slots]
    }
}

/// What a decision saw of one slot, and the cost that it computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quote {
    pub(crate) overlap: Overlap,
    pub(crate) predicted_blocks: u32,
    pub(crate) fidelity: f64,
    pub(crate) flags: u32,
    pub(crate) cost: CostBreakdown,
}

/// A count of at most 31 bits: processors without wide registers convert no unsigned ones.
#[inline]
fn number(count: u32) -> f64 {
    f64::from(count.cast_signed())
}

#[inline]
fn share_of(fidelity: u32) -> f64 {
    // A power of two, so that this equals the division.
    const UNIT: f64 = 1.0 / WHOLE as f64;
    number(fidelity) * UNIT
}

/// Slots are 16 bits.
fn slot(index: usize) -> Slot {
    Slot(u32::try_from(index).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::{Overrides, RouterConfig};
    use crate::trust::TrustState;

    fn ask(request_blocks: u32) -> Ask {
        let config = RouterConfig {
            prefill_weight: 1.5,
            request_weight: 0.25,
            device_hit_credit: 0.9,
            ..RouterConfig::default()
        };
        Ask {
            weights: CostWeights::new(&config, &Overrides::default()),
            request_blocks,
            grown_blocks: request_blocks + 1,
            preferred: Some((Slot(1), 0.9)),
            flags: Flags::eligible(None, None, false),
        }
    }

    proptest! {
        /// The pass over all slots, the sum of one, and the way by tiers agree to the bit.
        #[test]
        fn every_way_to_price_agrees(
            slots in prop::collection::vec((0..50usize, 0..90usize, 0.0..40.0f64, 0.0..=1.0f64, any::<bool>()), 1..40),
            depths in prop::collection::vec((0..=30u32, 0..=30u32, 0..=30u32), 1..40),
        ) {
            let rows: Vec<Row> = slots.iter().map(|(requests, blocks, prefill, fidelity, is_draining)| {
                let row = Row::default();
                row.begin(flag::PRESENT);
                row.set_load(*requests, *blocks, *prefill);
                row.set_belief(TrustState::Exact, *fidelity);
                row.set_flag(flag::DRAINING, *is_draining);
                row
            }).collect();
            let column = |part: fn(&(u32, u32, u32)) -> u32| depths.iter().map(part).collect::<Vec<_>>();
            let (confirmed, placed) = (column(|depths| depths.0), column(|depths| depths.1));
            let mut shared = Shared::default();
            shared.reset(rows.len());
            for (shared, depths) in shared.blocks.iter_mut().zip(&depths) {
                *shared = depths.2;
            }
            let mut tiers = Overlaps::new();
            tiers.reset(rows.len());
            for (slot, device) in (0..).zip(&confirmed).take(rows.len()) {
                tiers.at(Slot(slot)).device = *device;
            }
            let (mut costs, mut by_tier) = (Vec::new(), Vec::new());
            let ask = ask(30);
            let mut columns = Columns::default();
            for (tiers, costs) in [(None, &mut costs), (Some(&tiers), &mut by_tier)] {
                let depths = Depths { confirmed: &confirmed, tiers, placed: &placed, shared: &shared, allowed: &[] };
                let (first, second) = rows.split_at(rows.len() / 3);
                let lowest = columns.take_in((0, rows.len()), [first, second].into_iter(), &depths, &ask, costs);
                prop_assert_eq!(lowest.to_bits(), cheapest(costs).to_bits());
            }
            let bits = |costs: &[f64]| costs.iter().map(|cost| cost.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&costs), bits(&by_tier));
            let candidates: Vec<Slot> = columns.candidates(&ask).collect();
            for (at, total) in costs.iter().enumerate() {
                let slot = columns.slot(at);
                prop_assert_eq!(candidates.contains(&slot), total.is_finite());
                if total.is_finite() {
                    let quote = columns.quote(slot, &ask).unwrap();
                    prop_assert_eq!(quote.cost.total.to_bits(), total.to_bits());
                }
            }
        }
    }

    #[test]
    fn a_range_of_slots_is_cut_from_the_rows() {
        let rows: Vec<Row> = (0..300).map(|_| Row::default()).collect();
        for (slot, row) in rows.iter().enumerate() {
            row.begin(flag::PRESENT);
            row.set_load(slot, slot, 0.0);
        }
        let shared = Shared::default();
        let depths = Depths {
            confirmed: &[],
            tiers: None,
            placed: &[],
            shared: &shared,
            allowed: &[],
        };
        let pieces = || [&rows[..64], &rows[64..128], &rows[128..300]].into_iter();
        let (mut columns, mut costs) = (Columns::default(), Vec::new());
        let mut ask = ask(10);
        for (first, slots) in [(0, 1), (63, 2), (64, 1), (100, 150), (299, 1), (290, 20)] {
            columns.take_in((first, slots), pieces(), &depths, &ask, &mut costs);
            assert_eq!(costs.len(), slots);
            for (at, cost) in costs.iter().enumerate() {
                let slot = first + at;
                assert_eq!(cost.is_finite(), slot < 300, "{first} {slots} {at}");
                let requests = columns.count(Column::Requests, at) as usize;
                assert!(slot >= 300 || requests == slot, "{first} {slots} {at}");
            }
        }
        // Slots that the request does not list are no candidates.
        ask.flags = Flags::eligible(None, None, true);
        let allowed = [280, 7];
        let listed = Depths {
            allowed: &allowed,
            ..depths
        };
        columns.take_in((0, 300), pieces(), &listed, &ask, &mut costs);
        let candidates: Vec<Slot> = columns.candidates(&ask).collect();
        assert_eq!(candidates, [Slot(7), Slot(280)]);
    }

    #[test]
    fn filters_look_at_flags() {
        let present = flag::PRESENT | flag::of_role(Role::Decode) | flag::of_rank(2);
        let eligible = |role, rank, listed| Flags::eligible(role, rank, listed).are(present);
        assert!(eligible(None, None, false));
        assert!(eligible(Some(Role::Decode), Some(2), false));
        assert!(!eligible(Some(Role::Prefill), None, false));
        assert!(!eligible(None, Some(0), false));
        assert!(!eligible(None, Some(u32::MAX), false));
        assert!(!eligible(None, None, true));
        assert!(Flags::any().are(present | flag::DRAINING));
        assert!(!Flags::eligible(None, None, false).are(present | flag::DRAINING));
        assert!(!Flags::any().are(0));
    }
}
