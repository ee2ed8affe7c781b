//! A decision allocates its answer and nothing else, once its thread is warm and its prompts are known.

#![expect(clippy::unwrap_used, reason = "what fails to unwrap fails the test")]

use std::time::{Duration, Instant};

use allocation_counter::measure;
use kvlane::{Outcome, Prompt, Router, RouterConfig, SaltContext, SelectRequest, WorkerSpec};

const WORKERS: u32 = 100;
const PROMPTS: u32 = 40;

struct World {
    router: Router,
    prompts: Vec<Prompt>,
    now: Instant,
}

impl World {
    #[expect(clippy::disallowed_methods, reason = "a test has a clock")]
    fn new() -> Self {
        let mut config = RouterConfig::default();
        config.seed = Some(5);
        let (router, now) = (Router::new(config).unwrap(), Instant::now());
        for worker in 0..WORKERS {
            let spec = WorkerSpec::new(&format!("worker-{worker}")).unwrap();
            router.add_worker(spec, now).unwrap();
        }
        let prompts = (0..PROMPTS).map(|number| {
            // Four system prompts of 512 tokens, and 1,536 tokens of each prompt's own.
            let tokens: Vec<u32> = (0..2_048)
                .map(|at| if at < 512 { number % 4 } else { number + 100 } * 10_000 + at)
                .collect();
            router.prompt(&tokens, &SaltContext::default())
        });
        Self {
            prompts: prompts.collect(),
            router,
            now,
        }
    }

    /// Decides on every prompt, with up to 16 requests at a time.
    fn round(&mut self) {
        let mut live = std::collections::VecDeque::with_capacity(16);
        for prompt in &self.prompts {
            self.now += Duration::from_micros(10);
            let request = SelectRequest::new(prompt);
            live.push_back(self.router.select(&request, self.now).unwrap().unwrap());
            if live.len() == 16 {
                live.pop_front().unwrap().release(&Outcome::ok(), self.now);
            }
        }
        for guard in live.drain(..) {
            guard.release(&Outcome::ok(), self.now);
        }
    }
}

#[test]
fn a_decision_allocates_its_answer_alone() {
    const ROUNDS: u32 = 50;
    let mut world = World::new();
    for _ in 0..200 {
        world.round();
    }
    let used = measure(|| {
        for _ in 0..ROUNDS {
            world.round();
        }
    });
    // The answer itself, and the list of this test in each round. Lists that double now and then are a per cent at most.
    let answers = u64::from(ROUNDS * PROMPTS);
    let expected = answers + u64::from(ROUNDS);
    println!("{} allocations for {answers} answers", used.count_total);
    assert!(used.count_total >= answers);
    assert!(used.count_total <= expected + answers / 100, "{used:?}");
    // An answer is a few hundred bytes: its columns are those of an answer that was forgotten.
    assert!(used.bytes_total < 600 * answers, "{used:?}");
}
