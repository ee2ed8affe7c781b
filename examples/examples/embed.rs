//! The router inside a gateway of one's own: events come in, requests are placed, answers teach.
//!
//! `cargo run -p kvlane-examples --example embed`

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Instant;

use kvlane::event::encode::encode_batch;
use kvlane::event::{BlockStored, EventBatch, KvEvent};
use kvlane::index::EngineHash;
use kvlane::{Outcome, Result, Router, RouterConfig, SaltContext, SelectRequest, WorkerSpec};

fn main() -> Result<()> {
    let router = Router::new(RouterConfig::default())?;
    for id in ["w1", "w2"] {
        router.add_worker(
            WorkerSpec::new(id)?.kv_capacity_blocks(Some(926)),
            Instant::now(),
        )?;
    }

    // What an engine would publish: w2 holds the first 64 tokens of a conversation.
    let conversation: Vec<u32> = (0..100).collect();
    let payload = encode_batch(&EventBatch {
        ts: 1.0,
        events: vec![KvEvent::Stored(BlockStored {
            block_hashes: (1..=4).map(EngineHash::Int).collect(),
            token_ids: conversation[..64].to_vec(),
            block_size: 16,
            ..BlockStored::default()
        })],
        ..EventBatch::default()
    });
    let report = router.ingest("w2", 0, Some(0), &payload, Instant::now())?;
    println!("applied {} event(s)", report.applied);

    let prompt = router.prompt(&conversation, &SaltContext::default());
    let Some(guard) = router.select(&SelectRequest::new(&prompt), Instant::now())? else {
        println!("no worker is eligible");
        return Ok(());
    };
    println!(
        "goes to {}, which holds {} of {} blocks",
        guard.worker(),
        guard.decision().overlap_blocks(),
        prompt.blocks()
    );
    for candidate in guard.decision().candidates() {
        println!(
            "  {}: cost {:.1} = {:.1} uncached prefill + {:.1} waiting + {:.1} active blocks",
            candidate.target.worker,
            candidate.cost.total,
            candidate.cost.uncached_prefill_blocks,
            candidate.cost.booked_prefill_blocks,
            candidate.cost.decode_blocks
        );
    }
    assert_eq!(guard.worker(), "w2");

    guard.prefill_done(Instant::now());
    // The engine reported `usage.prompt_tokens_details.cached_tokens` = 64: as predicted, so w2 keeps its full credit.
    guard.release(&Outcome::ok().reported(Some(64), Some(100)), Instant::now());
    let trust = router.trust("w2", 0, Instant::now())?;
    println!("w2 is {} with fidelity {:.2}", trust.state, trust.fidelity);
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_runs() {
        super::main().unwrap();
    }
}
