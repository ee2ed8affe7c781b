//! What a slot holds of a run when that is more than a plain prefix on its device.

use super::node::as_offset;
use crate::index::Tier;

/// Residency of one slot in one run, tier by tier and unit by unit.
///
/// A bit stands for the last block of a held unit. Whether the unit's other blocks count depends on the prompt, and they
/// may lie in parent runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Detail {
    /// Sorted by tier, best first, then by unit; none is empty.
    layers: Vec<Layer>,
}

/// Held units of one size in one tier.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) tier: Tier,
    /// Blocks a unit.
    pub(super) unit: u32,
    /// Without trailing zero words.
    ends: Vec<u64>,
}

impl Detail {
    /// Describes a plain prefix on the device.
    pub(super) fn prefix(cutoff: u16) -> Self {
        let mut detail = Self::default();
        if cutoff > 0 {
            detail.set(Tier::Device, 1, 0, cutoff);
        }
        detail
    }

    /// Returns the length of the plain device prefix that this is, or `None` when it is anything else.
    pub(super) fn as_prefix(&self) -> Option<u16> {
        match self.layers.as_slice() {
            [] => Some(0),
            [layer] if layer.tier == Tier::Device && layer.unit == 1 => {
                let prefix = self.unit_prefix();
                (self.last_end() == prefix).then_some(prefix)
            }
            _ => None,
        }
    }

    /// Marks the units that end at `from..to` as held.
    pub(super) fn set(&mut self, tier: Tier, unit: u32, from: u16, to: u16) {
        let at = self.search(tier, unit).unwrap_or_else(|at| {
            let layer = Layer {
                tier,
                unit,
                ends: Vec::new(),
            };
            self.layers.insert(at, layer);
            at
        });
        let ends = &mut self.layers[at].ends;
        let words = usize::from(to).div_ceil(64);
        if ends.len() < words {
            ends.resize(words, 0);
        }
        for_each_word(from.into(), to.into(), |word, mask| ends[word] |= mask);
    }

    /// Marks the units that end at `from..to` as not held.
    pub(super) fn unset(&mut self, tier: Tier, unit: u32, from: u16, to: u16) {
        let Ok(at) = self.search(tier, unit) else {
            return;
        };
        let ends = &mut self.layers[at].ends;
        for_each_word(from.into(), to.into(), |word, mask| {
            if let Some(bits) = ends.get_mut(word) {
                *bits &= !mask;
            }
        });
        while ends.last() == Some(&0) {
            ends.pop();
        }
        if ends.is_empty() {
            self.layers.remove(at);
        }
    }

    pub(super) fn holds(&self, tier: Tier, unit: u32, offset: u16) -> bool {
        self.search(tier, unit)
            .is_ok_and(|at| self.layers[at].bit(offset))
    }

    /// Tells whether some unit is longer than one block.
    pub(super) fn is_coarse(&self) -> bool {
        self.layers.iter().any(|layer| layer.unit > 1)
    }

    pub(super) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Returns the number of leading blocks up to and with the last one that ends a held unit.
    pub(super) fn last_end(&self) -> u16 {
        self.layers.iter().map(Layer::last_end).max().unwrap_or(0)
    }

    /// Returns the unbroken prefix over all tiers, counting units of one block alone.
    pub(super) fn unit_prefix(&self) -> u16 {
        let mut blocks = 0;
        for word in 0.. {
            let held = self.unit_word(word, |_| true);
            blocks += held.trailing_ones() as usize;
            if held != u64::MAX {
                break;
            }
        }
        as_offset(blocks)
    }

    /// Counts for each tier how many of the first `blocks` blocks have it as their best one, with units of one block alone.
    pub(super) fn best_tiers(&self, blocks: u16) -> [u32; Tier::ALL.len()] {
        let mut counts = [0; Tier::ALL.len()];
        for_each_word(0, blocks.into(), |word, mask| {
            let mut open = mask;
            for tier in Tier::ALL {
                let held = open & self.unit_word(word, |layer| layer.tier == tier);
                counts[tier.index()] += held.count_ones();
                open &= !held;
            }
        });
        counts
    }

    fn unit_word(&self, word: usize, wanted: impl Fn(&Layer) -> bool) -> u64 {
        let layers = self.layers.iter();
        layers
            .filter(|layer| layer.unit == 1 && wanted(layer))
            .fold(0, |held, layer| {
                held | layer.ends.get(word).copied().unwrap_or(0)
            })
    }

    fn search(&self, tier: Tier, unit: u32) -> Result<usize, usize> {
        self.layers
            .binary_search_by_key(&(tier, unit), |layer| (layer.tier, layer.unit))
    }
}

impl Layer {
    /// Returns the offsets of the last blocks of held units that lie in the first `blocks` blocks.
    pub(super) fn ends(&self, blocks: u16) -> impl Iterator<Item = u16> {
        let words = self.ends.iter().enumerate();
        words
            .flat_map(|(word, &bits)| {
                let next = |bits: &u64| Some(bits & (bits - 1)).filter(|rest| *rest != 0);
                let first = Some(bits).filter(|bits| *bits != 0);
                std::iter::successors(first, next)
                    .map(move |bits| as_offset(word * 64 + bits.trailing_zeros() as usize))
            })
            .take_while(move |&offset| offset < blocks)
    }

    fn bit(&self, offset: u16) -> bool {
        let word = self.ends.get(usize::from(offset) / 64);
        word.is_some_and(|bits| bits >> (offset % 64) & 1 == 1)
    }

    fn last_end(&self) -> u16 {
        let last = self.ends.last().copied().unwrap_or(0);
        as_offset((self.ends.len() * 64).saturating_sub(last.leading_zeros() as usize))
    }
}

/// Visits the 64-bit words that cover `from..to` with the mask of the bits inside it.
pub(super) fn for_each_word(from: usize, to: usize, mut visit: impl FnMut(usize, u64)) {
    let mut at = from;
    while at < to {
        let word = at / 64;
        let end = to.min((word + 1) * 64);
        let ones = end - at;
        let mask = if ones == 64 {
            u64::MAX
        } else {
            ((1 << ones) - 1) << (at % 64)
        };
        visit(word, mask);
        at = end;
    }
}
