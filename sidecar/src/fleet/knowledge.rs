//! What is known of a worker beyond its configuration.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::worker::Model;
use crate::pool::describe::Described;

/// What is known of a worker at one moment, shared with it and not copied.
#[derive(Clone, Debug)]
pub(crate) struct Knowledge {
    pub(super) description: Arc<Description>,
    /// The models that it serves.
    pub(crate) models: Arc<Vec<Model>>,
    /// Its labels.
    pub(crate) labels: Arc<BTreeMap<String, String>>,
}

impl Knowledge {
    /// Returns what its engine says of itself; `None` before it was asked.
    pub(crate) fn described(&self) -> Option<Described> {
        self.description.told()
    }

    /// Tells whether nothing was learned in between: whatever changes is replaced as a whole, so equal places are enough.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.description, &other.description)
            && Arc::ptr_eq(&self.models, &other.models)
            && Arc::ptr_eq(&self.labels, &other.labels)
    }
}

/// What an engine says of itself, and what that contradicts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Description {
    /// As it answers questions.
    pub(super) answered: Described,
    /// As its metrics show.
    pub(super) measured: Described,
    /// The engine was asked, and answered if only that it does not know.
    pub(super) was_asked: bool,
    pub(super) mismatches: Vec<String>,
}

impl Description {
    pub(super) fn whole(&self) -> Described {
        let mut whole = self.answered.clone();
        whole.block_size = self.measured.block_size.or(whole.block_size);
        whole.kv_blocks = self.measured.kv_blocks.or(whole.kv_blocks);
        whole.dp_ranks = self.measured.dp_ranks.or(whole.dp_ranks);
        whole
    }

    /// Returns it; `None` before the engine was asked.
    pub(super) fn told(&self) -> Option<Described> {
        self.was_asked.then(|| self.whole())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knowledge() -> Knowledge {
        Knowledge {
            description: Arc::default(),
            models: Arc::default(),
            labels: Arc::default(),
        }
    }

    #[test]
    fn anything_replaced_is_news() {
        let before = knowledge();
        assert!(before.is_same(&before.clone()));
        let other = knowledge();
        for change in [
            |now: &mut Knowledge, other: &Knowledge| now.description.clone_from(&other.description),
            |now: &mut Knowledge, other: &Knowledge| now.models.clone_from(&other.models),
            |now: &mut Knowledge, other: &Knowledge| now.labels.clone_from(&other.labels),
        ] {
            let mut now = before.clone();
            change(&mut now, &other);
            assert!(!now.is_same(&before));
        }
    }
}
