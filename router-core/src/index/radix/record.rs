//! What a slot knows of one engine key, and its 8-byte form.

use super::node::{Location, RunId};
use crate::index::Tier;

/// A key's place and its residency in each tier; at least one tier holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Last block of the unit.
    pub(super) at: Location,
    pub(super) tiers: Tiers,
}

/// Residency of one key, by [`Tier::index`].
pub(super) type Tiers = [Residency; Tier::ALL.len()];

/// Residency of one key in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Residency {
    /// Announcements not yet removed; 0 when the tier does not hold the key.
    pub(super) count: u32,
    /// Blocks of the unit; 0 when not held.
    pub(super) unit: u32,
    /// Known from before events were lost, and not announced since.
    pub(super) doubted: bool,
}

/// What a store does to one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Not held in the tier yet.
    Place,
    /// Held elsewhere by a guess only, which gives way.
    Move,
    /// Held in the tier by a guess with another unit, which gives way.
    Replace,
    /// Held in the tier: counted.
    Repeat,
    /// Announced before events were lost and confirmed since: nothing to add.
    Ignore,
    /// Held at another place or with another unit.
    Refuse,
}

impl Residency {
    pub(super) const fn one(unit: u32, confirmed: bool) -> Self {
        Self {
            count: 1,
            unit,
            doubted: !confirmed,
        }
    }

    /// Counts one more announcement; a confirmed one replaces guesses.
    pub(super) const fn repeat(&mut self, confirmed: bool) {
        if confirmed && self.doubted {
            *self = Self::one(self.unit, true);
        } else {
            self.count = self.count.saturating_add(1);
        }
    }

    pub(super) const fn is_held(&self) -> bool {
        self.count > 0
    }
}

impl Record {
    pub(super) const fn new(at: Location) -> Self {
        const NONE: Residency = Residency {
            count: 0,
            unit: 0,
            doubted: false,
        };
        Self {
            at,
            tiers: [NONE; Tier::ALL.len()],
        }
    }

    pub(super) fn is_held(&self) -> bool {
        self.tiers.iter().any(Residency::is_held)
    }

    /// Tells whether every residency is a guess.
    fn is_guess(&self) -> bool {
        let mut held = self.tiers.iter().filter(|tier| tier.is_held());
        held.all(|tier| tier.doubted)
    }

    /// Returns the unit in the best tier that holds the key.
    pub(super) fn best_unit(&self) -> u32 {
        let best = self.tiers.iter().find(|tier| tier.is_held());
        best.map_or(1, |tier| tier.unit)
    }

    pub(super) fn held(&self) -> impl Iterator<Item = (Tier, Residency)> {
        Tier::ALL
            .into_iter()
            .zip(self.tiers)
            .filter(|(_, residency)| residency.is_held())
    }
}

impl Verdict {
    /// Decides what a store of a key at `at` does to what is known of the key.
    pub(super) fn of(
        known: Option<&Record>,
        at: Location,
        tier: Tier,
        unit: u32,
        confirmed: bool,
    ) -> Self {
        let Some(record) = known else {
            return Self::Place;
        };
        if record.at != at {
            return if confirmed && record.is_guess() {
                Self::Move
            } else {
                Self::Refuse
            };
        }
        let held = record.tiers[tier.index()];
        if !held.is_held() {
            Self::Place
        } else if held.unit == unit {
            if confirmed || held.doubted {
                Self::Repeat
            } else {
                Self::Ignore
            }
        } else if confirmed && held.doubted {
            Self::Replace
        } else {
            Self::Refuse
        }
    }

    /// Tells whether the key's place in the tier is newly held by the key.
    pub(super) const fn holds(self) -> bool {
        matches!(self, Self::Place | Self::Move | Self::Replace)
    }
}

/// A [`Record`] in 8 bytes, when its counts are at most 7, its units are one of 1, 2, 4 and 8 and the same in every tier,
/// and all or none of its residencies are doubted; otherwise only the place, and the mark that the rest lies aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packed {
    run: RunId,
    offset: u16,
    /// Bits 0-11: counts by tier, 12-13: logarithm of the unit, 14: doubted, 15: the rest lies aside.
    state: u16,
}

impl Packed {
    const ASIDE: u16 = 1 << 15;
    const DOUBTED: u16 = 1 << 14;

    /// Packs what fits.
    pub(super) fn pack(record: &Record) -> Self {
        Self {
            run: record.at.run,
            offset: record.at.offset,
            state: Self::state(record).unwrap_or(Self::ASIDE),
        }
    }

    pub(super) const fn at(self) -> Location {
        Location {
            run: self.run,
            offset: self.offset,
        }
    }

    /// Tells whether [`unpack`](Self::unpack) knows the place only.
    pub(super) const fn is_aside(self) -> bool {
        self.state & Self::ASIDE != 0
    }

    pub(super) fn unpack(self) -> Record {
        let mut record = Record::new(self.at());
        if self.is_aside() {
            return record;
        }
        for (tier, residency) in record.tiers.iter_mut().enumerate() {
            let count = self.state >> (3 * tier) & 7;
            if count > 0 {
                *residency = Residency {
                    count: u32::from(count),
                    unit: 1 << (self.state >> 12 & 3),
                    doubted: self.state & Self::DOUBTED != 0,
                };
            }
        }
        record
    }

    /// Doubts every residency; what lies aside is doubted there.
    pub(super) const fn doubt(&mut self) {
        if !self.is_aside() {
            self.state |= Self::DOUBTED;
        }
    }

    fn state(record: &Record) -> Option<u16> {
        let (_, first) = record.held().next()?;
        let unit = [1, 2, 4, 8].iter().position(|&unit| unit == first.unit)?;
        let mut state = u16::try_from(unit).ok()? << 12;
        if first.doubted {
            state |= Self::DOUBTED;
        }
        for (tier, residency) in record.held() {
            let alike = residency.unit == first.unit && residency.doubted == first.doubted;
            if !alike || residency.count > 7 {
                return None;
            }
            state |= u16::try_from(residency.count).ok()? << (3 * tier.index());
        }
        Some(state)
    }
}
