//! Predicted cached tokens against what the engine reports for the same request.

/// One finished request, in tokens.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// Cached tokens that the decision counted on, from events and own placements together.
    pub predicted_tokens: u32,
    /// The part of it that events alone had confirmed.
    pub confirmed_tokens: u32,
    /// What the engine reported (`usage.prompt_tokens_details.cached_tokens`).
    pub reported_tokens: u32,
    /// Tokens per block: differences below one block are rounding.
    pub block_tokens: u32,
    /// The prompt was matched by token ids, so that events can be held against it.
    pub exact_tokens: bool,
}

/// What an observation, together with those before it, says about the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Nothing new.
    Nothing,
    /// Events and reports contradict each other persistently; the likely cause.
    Mismatch(&'static str),
    /// Events and reports agree persistently.
    Agreement,
}

/// Running comparison of one (worker, rank).
#[derive(Clone, Copy, Debug)]
pub struct Audit {
    fidelity: f64,
    unpredicted_in_a_row: u32,
    broken_in_a_row: u32,
    agreed_in_a_row: u32,
}

/// Weight of the newest observation. Five observations of zero bring the fidelity from 1 to 0.33: fast enough to stop
/// trusting a worker within a handful of requests, slow enough for one eviction to cost a fifth.
const NEWEST: f64 = 0.2;
/// Contradictions in a row that name a mismatch: hits that nothing predicted are rare by chance, evictions are not.
const UNPREDICTED: u32 = 4;
const BROKEN: u32 = 8;
/// Agreements in a row that end a mismatch.
const AGREED: u32 = 4;

impl Default for Audit {
    fn default() -> Self {
        Self {
            fidelity: 1.0,
            unpredicted_in_a_row: 0,
            broken_in_a_row: 0,
            agreed_in_a_row: 0,
        }
    }
}

impl Audit {
    /// Returns the share of predicted cached tokens that the engine confirms, 0 to 1; recent requests weigh more.
    #[must_use]
    pub const fn fidelity(&self) -> f64 {
        self.fidelity
    }

    /// Takes in one request. `judged` says that the events claim to be complete, so that they can be contradicted.
    pub fn observe(&mut self, seen: &Observation, judged: bool) -> Finding {
        // Complete events are the engine's word; what was guessed beyond them, and evicted meanwhile, is not its fault.
        let promised = if judged && seen.exact_tokens && seen.confirmed_tokens > 0 {
            seen.confirmed_tokens
        } else {
            seen.predicted_tokens
        };
        if promised > 0 {
            let confirmed = seen.reported_tokens.saturating_add(seen.block_tokens) > promised;
            let share = if confirmed {
                1.0
            } else {
                f64::from(seen.reported_tokens) / f64::from(promised)
            };
            self.fidelity += NEWEST * (share - self.fidelity);
        }
        if !judged || !seen.exact_tokens {
            return Finding::Nothing;
        }
        self.judge(seen)
    }

    fn judge(&mut self, seen: &Observation) -> Finding {
        let two_blocks = seen.block_tokens.saturating_mul(2);
        let unpredicted = seen
            .predicted_tokens
            .max(seen.confirmed_tokens)
            .saturating_add(two_blocks)
            <= seen.reported_tokens;
        let broken =
            seen.confirmed_tokens >= two_blocks && seen.reported_tokens < seen.confirmed_tokens / 2;
        let agreed = seen.confirmed_tokens > 0
            && seen.confirmed_tokens.abs_diff(seen.reported_tokens) < two_blocks;
        let count =
            |counter: u32, happened: bool, contradicted: bool| match (happened, contradicted) {
                (true, _) => counter.saturating_add(1),
                (false, true) => 0,
                (false, false) => counter,
            };
        self.unpredicted_in_a_row = count(self.unpredicted_in_a_row, unpredicted, agreed);
        self.broken_in_a_row = count(self.broken_in_a_row, broken, agreed);
        self.agreed_in_a_row = count(self.agreed_in_a_row, agreed, unpredicted || broken);
        if self.unpredicted_in_a_row >= UNPREDICTED {
            self.agreed_in_a_row = 0;
            return Finding::Mismatch(
                "the engine reports cached tokens that its events never matched: tokens differ between router and engine (chat template, tokenizer, salt or adapter)",
            );
        }
        if self.broken_in_a_row >= BROKEN {
            self.agreed_in_a_row = 0;
            return Finding::Mismatch(
                "the engine reports far fewer cached tokens than its events promise: salt, adapter, cache group or media differ",
            );
        }
        if self.agreed_in_a_row >= AGREED {
            return Finding::Agreement;
        }
        Finding::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(predicted: u32, confirmed: u32, reported: u32) -> Observation {
        Observation {
            predicted_tokens: predicted,
            confirmed_tokens: confirmed,
            reported_tokens: reported,
            block_tokens: 16,
            exact_tokens: true,
        }
    }

    #[test]
    fn a_guess_beyond_complete_events_does_not_lower_the_fidelity() {
        let mut audit = Audit::default();
        for _ in 0..5 {
            audit.observe(&seen(240, 96, 96), true);
        }
        assert!((audit.fidelity() - 1.0).abs() < 1e-9);
        // Where events claim nothing, the guess is all there is to hold a worker to.
        audit.observe(&seen(240, 96, 96), false);
        assert!(audit.fidelity() < 0.9);
    }

    #[test]
    fn rounding_below_a_block_keeps_the_fidelity() {
        let mut audit = Audit::default();
        audit.observe(&seen(160, 160, 145), true);
        assert!((audit.fidelity() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_broken_promise_costs_a_fifth_and_recovers() {
        let mut audit = Audit::default();
        audit.observe(&seen(160, 160, 0), true);
        assert!((audit.fidelity() - 0.8).abs() < 1e-12); // 1 + 0.2 × (0 − 1)
        audit.observe(&seen(160, 160, 160), true);
        assert!((audit.fidelity() - 0.84).abs() < 1e-12); // 0.8 + 0.2 × (1 − 0.8)
    }

    #[test]
    fn four_hits_that_nothing_predicted_name_a_mismatch() {
        let mut audit = Audit::default();
        for _ in 0..3 {
            assert_eq!(audit.observe(&seen(0, 0, 320), true), Finding::Nothing);
        }
        assert!(matches!(
            audit.observe(&seen(0, 0, 320), true),
            Finding::Mismatch(_)
        ));
        // It ends when events and reports agree again.
        for _ in 0..3 {
            assert!(!matches!(
                audit.observe(&seen(320, 320, 320), true),
                Finding::Agreement
            ));
        }
        assert_eq!(
            audit.observe(&seen(320, 320, 320), true),
            Finding::Agreement
        );
    }

    #[test]
    fn a_stream_that_joined_late_is_not_judged() {
        let mut audit = Audit::default();
        for _ in 0..20 {
            assert_eq!(audit.observe(&seen(0, 0, 320), false), Finding::Nothing);
        }
    }

    #[test]
    fn text_prompts_say_nothing_about_events() {
        let mut audit = Audit::default();
        for _ in 0..20 {
            let text = Observation {
                exact_tokens: false,
                ..seen(0, 0, 320)
            };
            assert_eq!(audit.observe(&text, true), Finding::Nothing);
        }
    }
}
