//! What is measured: ours, the reference model, and the peers, behind one contract.

pub mod ours;

#[cfg(feature = "peers")]
pub mod chain;
#[cfg(feature = "peers")]
pub mod dynamo;

use std::collections::BTreeMap;
use std::fmt;

use crate::workload::Event;

#[cfg(feature = "peers")]
pub use chain::Chain;
#[cfg(feature = "peers")]
pub use dynamo::{Crtc, CrtcTtl, Positional, RadixTree};
pub use ours::{Naive, Ours};

/// Leading blocks that each worker holds; workers with none are absent.
pub type Answer = BTreeMap<u32, u32>;

/// An index under measurement.
pub trait Subject {
    /// Its name in results.
    const NAME: Name;
    /// Whether [`expect`](Self::expect) means something to it.
    const IS_SIZED: bool = false;
    /// An event in its own types.
    type Event: Send;
    /// A prompt in its own types, used up by a lookup where the interface takes it by value.
    type Prompt: Send;
    /// Its way in for writes.
    type Writer: Writer<Event = Self::Event>;
    /// Its way in for lookups.
    type Reader: Reader<Prompt = Self::Prompt>;

    /// Creates an empty index for workers `0..workers`.
    fn new(workers: u32) -> Self;

    /// Returns a way in for writes; the events of one worker must all take the same.
    fn writer(&self) -> Self::Writer;

    /// Returns a way in for lookups.
    fn reader(&self) -> Self::Reader;

    /// Converts an event.
    fn event(event: Event) -> Self::Event;

    /// Converts a prompt.
    fn prompt(locals: &[u64]) -> Self::Prompt;

    /// Takes note of how many blocks each worker can hold.
    fn expect(&self, _workers: u32, _blocks: usize) {}

    /// Does the maintenance that its owner would do by a timer.
    fn maintain(&self) {}
}

/// Applies events.
pub trait Writer {
    /// An event in the subject's types.
    type Event;
    /// Whether another thread applies them, so that [`drain`](Self::drain) waits.
    const IS_ASYNC: bool = false;

    /// Applies an event, or hands it to the thread that does. Gives it back where the interface only borrows, so that
    /// freeing it is not timed.
    fn apply(&mut self, event: Self::Event) -> Option<Self::Event>;

    /// Returns when everything handed over has been applied.
    fn drain(&mut self) {}

    /// Takes a worker out of the index, for good.
    fn remove_worker(&mut self, worker: u32);
}

/// Looks prompts up.
pub trait Reader {
    /// A prompt in the subject's types.
    type Prompt;

    /// Looks a prompt up for all workers; the answer is computed and thrown away.
    fn look_up(&mut self, prompt: &mut Self::Prompt);

    /// Looks a prompt up by a call that builds a map, where that is another one. Returns whether it is.
    fn look_up_as_map(&mut self, _prompt: &mut Self::Prompt) -> bool {
        false
    }

    /// Looks a prompt up and returns the answer.
    fn answer(&mut self, prompt: &mut Self::Prompt) -> Answer;
}

/// A name of a subject, on the command line and in results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// kvlane's `RadixIndex`, its `TtlIndex` and its `Router`.
    Ours,
    /// kvlane's `NaiveIndex`, the reference model.
    Naive,
    /// `ConcurrentRadixTreeCompressed` of dynamo-kv-router.
    Crtc,
    /// `ChainIndex` of kv-index.
    Chain,
    /// `RadixTree` of dynamo-kv-router.
    Radix,
    /// `PositionalIndexer` of dynamo-kv-router.
    Positional,
}

impl Name {
    /// Every name, ours first.
    pub const ALL: [Self; 6] = [
        Self::Ours,
        Self::Crtc,
        Self::Chain,
        Self::Radix,
        Self::Positional,
        Self::Naive,
    ];

    /// Names that are built in.
    #[must_use]
    pub fn built() -> Vec<Self> {
        let peers = cfg!(feature = "peers");
        Self::ALL
            .into_iter()
            .filter(|name| peers || matches!(name, Self::Ours | Self::Naive))
            .collect()
    }

    /// Returns the text used on the command line and in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Naive => "naive",
            Self::Crtc => "crtc",
            Self::Chain => "chain",
            Self::Radix => "radix",
            Self::Positional => "positional",
        }
    }

    /// Returns the heading of its column.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Ours => "kvlane",
            Self::Naive => "naive model",
            Self::Crtc => "Dynamo CRTC",
            Self::Chain => "kv-index chain",
            Self::Radix => "Dynamo RadixTree",
            Self::Positional => "Dynamo Positional",
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Shape, Workload};

    /// Every subject answers a filled workload like the reference model, so that the timings are of the same work.
    fn agrees_with_the_model<S: Subject>() {
        let shape = Shape {
            workers: 5,
            conversations: 30,
            ..Shape::W
        };
        let (subject, model) = (S::new(shape.workers), Naive::new(shape.workers));
        let (mut writer, mut reference) = (subject.writer(), model.writer());
        let mut workload = Workload::new(shape);
        let mut publish = |event: Event| {
            writer.apply(S::event(event.clone()));
            reference.apply(Naive::event(event));
        };
        workload.fill(&mut publish);
        workload.churn(0..10, &mut publish);
        publish(workload.clear(4));
        writer.drain();
        let prompts = (0..40)
            .map(|number| shape.prompt(number))
            .chain([shape.stranger(12, 16), shape.stranger(12, 0)]);
        for locals in prompts {
            let answer = subject.reader().answer(&mut S::prompt(&locals));
            let wanted = model.reader().answer(&mut Naive::prompt(&locals));
            assert_eq!(answer, wanted, "{}", S::NAME);
        }
        for worker in 0..shape.workers {
            writer.remove_worker(worker);
        }
        writer.drain();
        let answer = subject.reader().answer(&mut S::prompt(&shape.prompt(15)));
        assert_eq!(answer, Answer::new());
    }

    #[test]
    fn ours_agrees_with_the_model() {
        agrees_with_the_model::<Ours>();
    }

    #[cfg(feature = "peers")]
    #[test]
    fn peers_agree_with_the_model() {
        agrees_with_the_model::<Crtc>();
        agrees_with_the_model::<Chain>();
        agrees_with_the_model::<RadixTree>();
        agrees_with_the_model::<Positional>();
    }
}
