//! Whether two engines are on one GPU, however each of them calls it.
//!
//! A card has an index and a UUID, which may be cut short, and a part of a card (MIG) a UUID of its own, which tells its card in an
//! old notation alone. Only the driver knows which index is which UUID.

use super::gpu::Inventory;

/// Whether two lists of GPUs have one in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Match {
    /// They do not.
    No,
    /// It cannot be told: they are called in different ways, and the driver does not tell which is which.
    Unknown,
    /// They do.
    Yes,
}

/// Compares two lists of GPUs, with what the driver tells of them where it does.
pub(super) fn compare(one: &[String], other: &[String], inventory: Option<&Inventory>) -> Match {
    let pairs = one
        .iter()
        .flat_map(|one| other.iter().map(move |other| (one.trim(), other.trim())));
    let all = pairs.map(|(one, other)| compare_two(one, other, inventory));
    all.max().unwrap_or(Match::No)
}

fn compare_two(one: &str, other: &str, inventory: Option<&Inventory>) -> Match {
    if one == other {
        return Match::Yes;
    }
    match (Name::of(one), Name::of(other)) {
        // Two parts of a card share nothing, and neither is called in two ways.
        (Name::Part(_), Name::Part(_)) => Match::No,
        (one, other) => one.is_card_of(&other, inventory),
    }
}

/// How a GPU is called.
enum Name<'a> {
    Index(u32),
    /// A card's UUID, or how it begins.
    Uuid(&'a str),
    /// A part of a card, whose UUID stands in it or does not.
    Part(Option<&'a str>),
    /// Nothing that the driver would understand.
    Other,
}

impl<'a> Name<'a> {
    fn of(text: &'a str) -> Self {
        if let Ok(index) = text.parse() {
            return Self::Index(index);
        }
        if let Some(part) = text.strip_prefix("MIG-") {
            let card = part.split('/').next();
            return Self::Part(card.filter(|card| card.starts_with("GPU-")));
        }
        if text.starts_with("GPU-") {
            return Self::Uuid(text);
        }
        Self::Other
    }

    /// Tells whether two names mean one card, or a card and its part.
    fn is_card_of(&self, other: &Self, inventory: Option<&Inventory>) -> Match {
        if let (Some(one), Some(other)) = (self.cards(inventory), other.cards(inventory)) {
            let is_one = one.iter().any(|index| other.contains(index));
            return if is_one { Match::Yes } else { Match::No };
        }
        match (self, other) {
            (Self::Index(one), Self::Index(other)) if one == other => Match::Yes,
            (Self::Index(_), Self::Index(_)) => Match::No,
            (
                Self::Uuid(one) | Self::Part(Some(one)),
                Self::Uuid(other) | Self::Part(Some(other)),
            ) => {
                if one.starts_with(other) || other.starts_with(one) {
                    Match::Yes
                } else {
                    Match::No
                }
            }
            _ => Match::Unknown,
        }
    }

    /// Returns the indices of the cards that are called so; `None` when the driver does not tell of any.
    fn cards(&self, inventory: Option<&Inventory>) -> Option<Vec<u32>> {
        let name = match self {
            Self::Index(index) => index.to_string(),
            Self::Uuid(uuid) | Self::Part(Some(uuid)) => (*uuid).to_owned(),
            Self::Part(None) | Self::Other => return None,
        };
        let gpus = inventory?.gpus.iter().filter(|gpu| gpu.is_called(&name));
        let cards: Vec<u32> = gpus.map(|gpu| gpu.index).collect();
        (!cards.is_empty()).then_some(cards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::process::gpu::Gpu;

    fn machine() -> Inventory {
        let gpu = |(index, uuid): (u32, &str)| Gpu {
            index,
            uuid: uuid.to_owned(),
            name: "H".to_owned(),
            memory_bytes: 1,
            free_bytes: 1,
            users: Vec::new(),
        };
        Inventory {
            driver: "1".to_owned(),
            cuda: None,
            gpus: [(0, "GPU-aaaa-1"), (1, "GPU-aabb-2")].map(gpu).to_vec(),
        }
    }

    /// Each line: two names, and the answer with the driver and without.
    #[test]
    fn names_of_one_card_are_matched_where_the_driver_tells() {
        use Match::{No, Unknown, Yes};
        let machine = machine();
        for (one, other, with, without) in [
            ("0", "0", Yes, Yes),
            ("0", " 0", Yes, Yes),
            ("0", "1", No, No),
            ("0", "GPU-aaaa-1", Yes, Unknown),
            ("1", "GPU-aaaa-1", No, Unknown),
            ("1", "GPU-aabb", Yes, Unknown),
            ("GPU-aaaa-1", "GPU-aaa", Yes, Yes),
            ("GPU-aaaa-1", "GPU-aabb-2", No, No),
            // Both cards begin so.
            ("1", "GPU-aa", Yes, Unknown),
            // A card of which the driver does not tell: it fell out, or is of another machine.
            ("5", "GPU-aaaa-1", Unknown, Unknown),
            ("5", "1", No, No),
            ("MIG-x", "MIG-x", Yes, Yes),
            ("MIG-x", "MIG-y", No, No),
            ("MIG-x", "0", Unknown, Unknown),
            ("MIG-GPU-aaaa-1/1/0", "0", Yes, Unknown),
            ("MIG-GPU-aaaa-1/1/0", "1", No, Unknown),
            ("MIG-GPU-aaaa-1/1/0", "GPU-aaaa-1", Yes, Yes),
            ("MIG-GPU-aaaa-1/1/0", "MIG-GPU-aaaa-1/2/0", No, No),
            ("NoDevFiles", "0", Unknown, Unknown),
        ] {
            for (inventory, wanted) in [(Some(&machine), with), (None, without)] {
                for (one, other) in [(one, other), (other, one)] {
                    let found = compare(&[one.to_owned()], &[other.to_owned()], inventory);
                    assert_eq!(found, wanted, "{one} {other}");
                }
            }
        }
    }

    #[test]
    fn one_of_a_list_is_enough_and_none_shares_nothing() {
        let list = |text: &str| -> Vec<String> { text.split(',').map(str::to_owned).collect() };
        let machine = machine();
        let known = |one: &str, other: &str| compare(&list(one), &list(other), Some(&machine));
        assert_eq!(known("0,MIG-x", "1,GPU-aaaa-1"), Match::Yes);
        assert_eq!(known("0,MIG-x", "1"), Match::Unknown);
        assert_eq!(compare(&[], &list("1"), None), Match::No);
    }
}
