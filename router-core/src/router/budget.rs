//! The bound of memory.

use crate::sync::atomic::Ordering;

use super::state::Inner;

impl Inner {
    /// Forgets what was used least recently, when the indexes take more than the configuration allows.
    pub(super) fn keep_budget(&self) {
        let Some(most) = self.config.max_index_bytes else {
            return;
        };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        // Who comes second finds it done.
        let Some(_one_at_a_time) = self.budget.try_lock() else {
            return;
        };
        let placements = [&self.token_placements, &self.text_placements];
        let placed = || {
            placements
                .map(|index| index.stats().bytes())
                .iter()
                .sum::<usize>()
        };
        let all = self.index.bytes() + placed();
        if all <= most {
            return;
        }
        // Each keeps its share of what is kept, so that neither starves the other.
        let kept = most / 8 * 7;
        let share = |bytes: usize| {
            let share = bytes as u128 * kept as u128 / all as u128;
            usize::try_from(share).unwrap_or(kept)
        };
        let mut gone = 0;
        for index in placements {
            gone += index.shrink_to(share(index.stats().bytes()));
        }
        gone += self.index.shrink_to(kept.saturating_sub(placed()));
        self.counts
            .forgotten_blocks
            .fetch_add(gone as u64, Ordering::Relaxed);
        for target in self.workers.read().targets() {
            // Under its lock, so that a batch that is being applied notes what it leaves after this.
            let _stream = target.stream.lock();
            self.note_resident(target);
        }
    }
}
