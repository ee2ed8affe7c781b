//! The requests: twelve prefixes, six sends each, shuffled.

use fastrand::Rng;
use serde_json::json;

/// One play of the workload.
#[derive(Debug)]
pub(super) struct Workload {
    requests: Vec<Request>,
}

/// One request of it.
#[derive(Debug)]
pub(super) struct Request {
    tokens: Vec<u32>,
    /// The prefix was sent before.
    pub(super) repeat: bool,
}

impl Workload {
    const PREFIXES: usize = 12;
    const SENDS: usize = 6;
    const PROMPT_TOKENS: usize = 1_500;
    const FRESH_TOKENS: usize = 24;
    const BLOCK_TOKENS: usize = 16;
    /// Requests of one play.
    pub(super) const REQUESTS: usize = Self::PREFIXES * Self::SENDS;
    /// Repeats of one play.
    pub(super) const REPEATS: usize = Self::REQUESTS - Self::PREFIXES;
    /// Tokens in the complete blocks of the shared part: 1,472 of 1,476.
    #[expect(clippy::cast_possible_truncation, reason = "a small constant")]
    pub(super) const SHARED_BLOCK_TOKENS: u32 = ((Self::PROMPT_TOKENS - Self::FRESH_TOKENS)
        / Self::BLOCK_TOKENS
        * Self::BLOCK_TOKENS) as u32;

    pub(super) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut random_tokens =
            |count: usize| -> Vec<u32> { (0..count).map(|_| rng.u32(1_000..100_000)).collect() };
        let prefixes: Vec<Vec<u32>> = (0..Self::PREFIXES)
            .map(|_| random_tokens(Self::PROMPT_TOKENS - Self::FRESH_TOKENS))
            .collect();
        let tails: Vec<Vec<u32>> = (0..Self::REQUESTS)
            .map(|_| random_tokens(Self::FRESH_TOKENS))
            .collect();
        let mut order: Vec<usize> = (0..Self::REQUESTS)
            .map(|send| send % Self::PREFIXES)
            .collect();
        rng.shuffle(&mut order);
        let mut seen = [false; Self::PREFIXES];
        let requests = order
            .into_iter()
            .zip(tails)
            .map(|(prefix, tail)| Request {
                tokens: [prefixes[prefix].as_slice(), &tail].concat(),
                repeat: std::mem::replace(&mut seen[prefix], true),
            })
            .collect();
        Self { requests }
    }

    pub(super) fn requests(&self) -> &[Request] {
        &self.requests
    }
}

impl Request {
    /// A streamed completion of two tokens that reports its usage.
    pub(super) fn body(&self, model: &str) -> Vec<u8> {
        let body = json!({
            "model": model,
            "prompt": self.tokens,
            "max_tokens": 2,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        body.to_string().into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_play_has_sixty_repeats_of_twelve_prefixes() {
        let workload = Workload::new(1);
        let repeats = workload
            .requests()
            .iter()
            .filter(|request| request.repeat)
            .count();
        assert_eq!(
            (workload.requests().len(), repeats, Workload::REPEATS),
            (72, 60, 60)
        );
        assert_eq!(Workload::SHARED_BLOCK_TOKENS, 1_472);
        assert!(
            workload
                .requests()
                .iter()
                .all(|request| request.tokens.len() == 1_500)
        );
    }

    #[test]
    fn seeds_decide_the_order() {
        let tokens = |seed| {
            let workload = Workload::new(seed);
            workload
                .requests()
                .iter()
                .map(|request| request.tokens.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(tokens(1), tokens(1));
        assert_ne!(tokens(1), tokens(2));
    }
}
