//! What streams that run already notice of a request.

use super::estimate::Stall;
use super::plan::{Context, ItlTerms};

impl Context<'_> {
    /// Predicts the gaps that running streams will have because of this request, where they are worst.
    pub(super) fn interference(&self, prefill: usize, decode: Option<usize>) -> ItlTerms {
        let mut terms = self.stalled_by_prompt(prefill);
        let Some(decode) = decode else {
            return terms;
        };
        let (processing, arriving) = (&self.workers[prefill], &self.workers[decode]);
        if arriving.running_streams == 0 {
            return terms;
        }
        let mut stall = Stall::default();
        if arriving.shares_device_with(processing) {
            stall = self.prompt_stall(prefill);
        } else {
            terms.add_streams(arriving.running_streams);
        }
        let arrival = self.transfer_stall(decode);
        stall.longest += arrival;
        stall.total += arrival;
        stall.count = stall.count.max(u64::from(arrival > 0.0));
        self.worsen(&mut terms, decode, stall);
        terms
    }

    /// Predicts what streams on the device of the prefill notice of the prompt.
    fn stalled_by_prompt(&self, prefill: usize) -> ItlTerms {
        let processing = &self.workers[prefill];
        let stall = self.prompt_stall(prefill);
        let mut terms = ItlTerms::default();
        let near = if processing.device.is_some() {
            0..self.workers.len()
        } else {
            prefill..prefill + 1
        };
        for at in near {
            let worker = &self.workers[at];
            if worker.running_streams > 0 && worker.shares_device_with(processing) {
                terms.add_streams(worker.running_streams);
                self.worsen(&mut terms, at, stall);
            }
        }
        terms
    }

    /// Takes in the gaps of one more worker's streams, if they are worse.
    fn worsen(&self, terms: &mut ItlTerms, at: usize, stall: Stall) {
        let base = self.speeds[at].0.gap.unwrap_or(0.0);
        let gap_seconds = base + stall.longest;
        let missed = self.missed(base, stall);
        if (missed, gap_seconds) > (terms.missed, terms.gap_seconds) {
            *terms = ItlTerms {
                gap_seconds,
                base_seconds: base,
                stall_seconds: stall.longest,
                stalled_gaps: stall.count,
                total_stall_seconds: stall.total,
                missed,
                stalled_streams: terms.stalled_streams,
            };
        }
    }

    /// Sums up by how much gaps miss their target. All are taken to be of their mean length.
    fn missed(&self, base: f64, stall: Stall) -> f64 {
        let Some(objective) = self.config.itl_objective_seconds else {
            return 0.0;
        };
        let count = stall.count as f64;
        let mean = base + stall.total / count.max(1.0);
        count * (mean / objective - 1.0).max(0.0)
    }

    fn prompt_stall(&self, prefill: usize) -> Stall {
        let worker = &self.workers[prefill];
        let input = self.request.input_tokens;
        self.speeds[prefill]
            .0
            .prefill_stall(input, worker.cached_tokens, worker.step_tokens)
    }

    fn transfer_stall(&self, decode: usize) -> f64 {
        let moved = self
            .request
            .input_tokens
            .saturating_sub(self.workers[decode].cached_tokens);
        let per_token = self.speeds[decode]
            .0
            .transfer_stall
            .unwrap_or(self.config.transfer_stall_seconds_per_token);
        per_token * moved as f64
    }
}

impl ItlTerms {
    fn add_streams(&mut self, streams: u32) {
        self.stalled_streams = self.stalled_streams.saturating_add(streams);
    }
}
