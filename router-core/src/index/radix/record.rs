//! What a slot knows of one engine key, and its short form.

use super::chunks::Place;
use super::slot::Announced;
use crate::index::Tier;

/// A key's place and its residency in each tier; at least one tier holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Last block of the unit.
    pub(super) at: Place,
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
    pub(super) const fn new(at: Place) -> Self {
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
    pub(super) fn of(known: Option<&Record>, at: Place, announced: &Announced) -> Self {
        let Announced {
            tier,
            unit,
            confirmed,
            ..
        } = *announced;
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

/// What a record says beside its place, in 5 bits, when it is one of the [`SHAPES`] and all or none of it is doubted;
/// otherwise the mark that the rest lies aside. The default is the common case: once on the device, one block, confirmed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Code(u8);

/// A record that has a code.
struct Shape {
    /// Blocks of the unit, the same in each tier.
    unit: u32,
    /// Counts by [`Tier::index`].
    counts: [u8; Tier::ALL.len()],
}

impl Code {
    pub(super) const BITS: u32 = 5;
    pub(super) const MASK: u32 = (1 << Self::BITS) - 1;
    const ASIDE: Self = Self(31);

    pub(super) const fn from_bits(bits: u32) -> Self {
        Self((bits & Self::MASK) as u8)
    }

    pub(super) const fn bits(self) -> u32 {
        self.0 as u32
    }

    /// Returns the code of a record.
    pub(super) fn of(record: &Record) -> Self {
        let Some((_, first)) = record.held().next() else {
            return Self::ASIDE;
        };
        let alike = |held: Residency| held.unit == first.unit && held.doubted == first.doubted;
        if !record.held().all(|(_, held)| alike(held)) {
            return Self::ASIDE;
        }
        let is = |shape: &Shape| {
            let counts = shape.counts.into_iter().zip(record.tiers);
            shape.unit == first.unit
                && counts
                    .into_iter()
                    .all(|(count, held)| u32::from(count) == held.count)
        };
        (0_u8..)
            .zip(&SHAPES)
            .find(|(_, shape)| is(shape))
            .map_or(Self::ASIDE, |(shape, _)| {
                Self(shape + if first.doubted { DOUBTED } else { 0 })
            })
    }

    /// Returns the code of a key that was announced once in one tier.
    pub(super) fn once(tier: Tier, unit: u32, confirmed: bool) -> Self {
        if tier == Tier::Device && unit == 1 && confirmed {
            return Self::default();
        }
        let mut record = Record::new(Place::NONE);
        record.tiers[tier.index()] = Residency::one(unit, confirmed);
        Self::of(&record)
    }

    /// Tells whether [`unpack`](Self::unpack) knows the place only.
    pub(super) fn is_aside(self) -> bool {
        self == Self::ASIDE
    }

    /// Tells whether this is the common case.
    pub(super) const fn is_plain(self) -> bool {
        self.0 == 0
    }

    pub(super) fn unpack(self, at: Place) -> Record {
        let mut record = Record::new(at);
        let doubted = self.0 >= DOUBTED;
        let shape = self.0 - if doubted { DOUBTED } else { 0 };
        let Some(shape) = SHAPES.get(usize::from(shape)) else {
            return record;
        };
        for (held, count) in record.tiers.iter_mut().zip(shape.counts) {
            if count > 0 {
                *held = Residency {
                    count: u32::from(count),
                    unit: shape.unit,
                    doubted,
                };
            }
        }
        record
    }

    /// Doubts every residency; what lies aside is doubted there.
    pub(super) fn doubted(self) -> Self {
        if self.0 < DOUBTED {
            Self(self.0 + DOUBTED)
        } else {
            self
        }
    }
}

/// The records that have a code, most frequent first.
const SHAPES: [Shape; 15] = {
    const fn shape(unit: u32, device: u8, host: u8, external: u8, disk: u8) -> Shape {
        Shape {
            unit,
            counts: [device, host, external, disk],
        }
    }
    [
        shape(1, 1, 0, 0, 0),
        shape(1, 2, 0, 0, 0),
        shape(1, 0, 1, 0, 0),
        shape(1, 1, 1, 0, 0),
        shape(1, 0, 0, 1, 0),
        shape(1, 0, 0, 0, 1),
        shape(2, 1, 0, 0, 0),
        shape(2, 0, 1, 0, 0),
        shape(2, 1, 1, 0, 0),
        shape(4, 1, 0, 0, 0),
        shape(4, 0, 1, 0, 0),
        shape(4, 1, 1, 0, 0),
        shape(8, 1, 0, 0, 0),
        shape(8, 0, 1, 0, 0),
        shape(8, 1, 1, 0, 0),
    ]
};

/// Added to the number of a shape that is doubted.
const DOUBTED: u8 = 15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_comes_back() {
        for bits in 0..31 {
            let code = Code::from_bits(bits);
            if bits < 30 {
                let record = code.unpack(Place::new(1, 2));
                assert!(record.is_held());
                assert_eq!(Code::of(&record), code);
            }
        }
        let mut odd = Record::new(Place::new(1, 2));
        odd.tiers[0] = Residency {
            count: 3,
            unit: 1,
            doubted: false,
        };
        assert!(Code::of(&odd).is_aside());
    }
}
