//! What a decision reads of every target, in 32 bytes without a lock.

use crate::ids::Role;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::trust::TrustState;

/// One target as decisions see it, at the index of its slot. A racing reader may see parts from different moments.
///
/// What is true is kept under the target's own locks; whoever holds one writes here what has changed.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(crate) struct Row {
    /// Active requests in the high half, active blocks in the low one.
    load: AtomicU64,
    /// Blocks still to be prefilled, as the bits of an f64.
    prefill: AtomicU64,
    /// Fidelity in units of 2^-30.
    fidelity: AtomicU32,
    flags: AtomicU32,
    /// Blocks that its events confirm, and blocks that it can hold (0: unknown).
    resident_blocks: AtomicU32,
    capacity_blocks: AtomicU32,
}

/// The part of a row that its cost depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) requests: u32,
    pub(crate) blocks: u32,
    pub(crate) prefill: f64,
    pub(crate) fidelity: u32,
    pub(crate) flags: u32,
}

/// Counts in rows go up to here, so that they are numbers of either sign to a processor.
pub(crate) const MAX_COUNT: u32 = i32::MAX as u32;
/// The fidelity of 1.
pub(crate) const WHOLE: u32 = 1 << 30;

/// Bits of [`Row::set_flags`] and of what is asked of them.
pub(crate) mod flag {
    /// The slot has a registered target.
    pub(crate) const PRESENT: u32 = 1;
    pub(crate) const DRAINING: u32 = 1 << 1;
    pub(crate) const UNAVAILABLE: u32 = 1 << 2;
    pub(crate) const SERVES_PREFILL: u32 = 1 << 3;
    pub(crate) const SERVES_DECODE: u32 = 1 << 4;
    pub(crate) const SERVES_BOTH: u32 = 1 << 5;
    /// Set by a decision in its own copy: the request's list has the worker.
    pub(crate) const ALLOWED: u32 = 1 << 6;
    const TRUST_AT: u32 = 8;
    const TRUST: u32 = 0xF << TRUST_AT;
    const RANK_AT: u32 = 16;
    /// The rank's bits.
    pub(crate) const RANK: u32 = NO_RANK << RANK_AT;
    /// Ranks stay below this one.
    pub(crate) const NO_RANK: u32 = 0xFFFF;

    use super::{Role, TrustState};

    pub(crate) const fn of_rank(dp_rank: u32) -> u32 {
        dp_rank << RANK_AT
    }

    pub(crate) fn of_role(role: Role) -> u32 {
        [
            (Role::Prefill, SERVES_PREFILL),
            (Role::Decode, SERVES_DECODE),
            (Role::Both, SERVES_BOTH),
        ]
        .into_iter()
        .filter(|(wanted, _)| role.serves(*wanted))
        .fold(0, |all, (_, bit)| all | bit)
    }

    /// The bit that a target must have to do the part.
    pub(crate) const fn to_serve(role: Role) -> u32 {
        match role {
            Role::Prefill => SERVES_PREFILL,
            Role::Decode => SERVES_DECODE,
            Role::Both => SERVES_BOTH,
        }
    }

    pub(crate) fn with_role(flags: u32, role: Role) -> u32 {
        flags & !(SERVES_PREFILL | SERVES_DECODE | SERVES_BOTH) | of_role(role)
    }

    pub(crate) const fn with_trust(flags: u32, state: TrustState) -> u32 {
        flags & !TRUST | (state as u32) << TRUST_AT
    }

    pub(crate) fn trust(flags: u32) -> TrustState {
        let state = TrustState::ALL.get(((flags & TRUST) >> TRUST_AT) as usize);
        state.copied().unwrap_or(TrustState::Unproven)
    }
}

impl Row {
    /// Empties the row for a new target.
    pub(crate) fn begin(&self, flags: u32) {
        self.load.store(0, Ordering::Relaxed);
        self.prefill.store(0, Ordering::Relaxed);
        self.fidelity.store(WHOLE, Ordering::Relaxed);
        self.resident_blocks.store(0, Ordering::Relaxed);
        self.capacity_blocks.store(0, Ordering::Relaxed);
        self.flags.store(flags, Ordering::Relaxed);
    }

    /// Takes the target out of every decision.
    pub(crate) fn end(&self) {
        self.flags.store(0, Ordering::Relaxed);
    }

    pub(crate) fn set_load(&self, requests: usize, blocks: usize, prefill: f64) {
        let load = u64::from(count(requests)) << 32 | u64::from(count(blocks));
        self.load.store(load, Ordering::Relaxed);
        self.prefill.store(prefill.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn set_flag(&self, bit: u32, value: bool) {
        if value {
            self.flags.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.flags.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn set_role(&self, role: Role) {
        // In one step: a decision must not see a target that serves nothing.
        let change = |flags| Some(flag::with_role(flags, role));
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.flags.fetch_update(set, fetch, change);
    }

    pub(crate) fn set_belief(&self, state: TrustState, fidelity: f64) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to 0..=1, so within 0..=WHOLE"
        )]
        let fidelity = (fidelity.clamp(0.0, 1.0) * f64::from(WHOLE)).round() as u32;
        self.fidelity.store(fidelity, Ordering::Relaxed);
        let flags = self.flags.load(Ordering::Relaxed);
        if flag::trust(flags) != state {
            // Other bits may change meanwhile.
            let change = |flags| Some(flag::with_trust(flags, state));
            let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
            let _ = self.flags.fetch_update(set, fetch, change);
        }
    }

    pub(crate) fn set_resident_blocks(&self, blocks: usize) {
        self.resident_blocks.store(count(blocks), Ordering::Relaxed);
    }

    pub(crate) fn set_capacity_blocks(&self, blocks: Option<usize>) {
        let blocks = count(blocks.unwrap_or(0));
        self.capacity_blocks.store(blocks, Ordering::Relaxed);
    }

    pub(crate) fn trust(&self) -> TrustState {
        flag::trust(self.flags.load(Ordering::Relaxed))
    }

    pub(crate) fn resident_blocks(&self) -> usize {
        self.resident_blocks.load(Ordering::Relaxed) as usize
    }

    pub(crate) fn capacity_blocks(&self) -> Option<usize> {
        match self.capacity_blocks.load(Ordering::Relaxed) {
            0 => None,
            blocks => Some(blocks as usize),
        }
    }

    #[inline]
    pub(crate) fn seen(&self) -> Seen {
        let load = self.load.load(Ordering::Relaxed);
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the low half is taken on purpose"
        )]
        let blocks = load as u32;
        Seen {
            requests: (load >> 32) as u32,
            blocks,
            prefill: f64::from_bits(self.prefill.load(Ordering::Relaxed)),
            fidelity: self.fidelity.load(Ordering::Relaxed),
            flags: self.flags.load(Ordering::Relaxed),
        }
    }
}

/// Returns a count as rows hold it.
pub(crate) fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(MAX_COUNT).min(MAX_COUNT)
}

/// Returns a fidelity as a share.
pub(crate) fn share(fidelity: u32) -> f64 {
    f64::from(fidelity) / f64::from(WHOLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_keeps_what_was_set() {
        let row = Row::default();
        row.begin(flag::PRESENT | flag::of_rank(3) | flag::of_role(Role::Decode));
        row.set_load(7, usize::MAX, 2.25);
        row.set_belief(TrustState::Converging, 0.8);
        row.set_flag(flag::DRAINING, true);
        row.set_flag(flag::UNAVAILABLE, true);
        row.set_flag(flag::DRAINING, false);
        let seen = row.seen();
        assert_eq!((seen.requests, seen.blocks), (7, MAX_COUNT));
        assert!((seen.prefill - 2.25).abs() < 1e-12);
        assert!((share(seen.fidelity) - 0.8).abs() < 1e-9);
        let rank = flag::of_rank(3);
        let decode = flag::PRESENT | flag::UNAVAILABLE | flag::SERVES_DECODE | rank;
        assert_eq!(seen.flags, flag::with_trust(decode, TrustState::Converging));
        assert_eq!(row.trust(), TrustState::Converging);
    }

    #[test]
    fn whole_and_no_fidelity_are_exact() {
        let row = Row::default();
        for fidelity in [0.0, 0.5, 1.0] {
            row.set_belief(TrustState::Exact, fidelity);
            assert_eq!(share(row.seen().fidelity).to_bits(), fidelity.to_bits());
        }
    }

    #[test]
    fn a_role_serves_its_part_and_both_serve_each() {
        assert_eq!(flag::of_role(Role::Prefill), flag::SERVES_PREFILL);
        let all = flag::SERVES_PREFILL | flag::SERVES_DECODE | flag::SERVES_BOTH;
        assert_eq!(flag::of_role(Role::Both), all);
        assert_eq!(flag::to_serve(Role::Both), flag::SERVES_BOTH);
    }
}
