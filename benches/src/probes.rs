//! Answers against the reference model: named situations that engines bring about, and random operations.
//!
//! A lookup is wrong when it differs from the model's for any worker, in either direction.

use std::collections::{HashMap, HashSet};

use fastrand::Rng;

use crate::measure::{Cells, Plan, float};
use crate::subject::{Naive, Name, Reader, Subject, Writer};
use crate::workload::{Event, engine_hashes, mix};

/// Workers of the random operations.
const WORKERS: u32 = 6;
/// Longest path of the random operations, in blocks.
const MAX_BLOCKS: usize = 12;
/// Different blocks of the random operations: few, so that paths meet.
const KINDS: u8 = 3;

/// Compares a subject with the model.
#[must_use]
pub fn measure<S: Subject>(plan: &Plan) -> Cells {
    let mut cells = Cells::new();
    let mut wrong = 0;
    for (name, play) in SITUATIONS {
        let mut world = World::<S>::new();
        play(&mut world.steps());
        wrong += world.wrong;
        cells.insert(format!("probe_{name}"), world.wrong.into());
    }
    // Peers apply events on another thread, and a round trip for each operation takes its time.
    let operations = match S::NAME {
        Name::Ours => plan.operations,
        _ => plan.operations / 10,
    };
    for (name, is_orderly) in [("orderly", true), ("any", false)] {
        let mut world = World::<S>::new();
        random_operations(&mut world, operations, is_orderly);
        wrong += world.wrong;
        cells.insert(format!("random_{name}_operations"), operations.into());
        cells.insert(format!("random_{name}_lookups"), world.lookups.into());
        cells.insert(format!("random_{name}_wrong"), world.wrong.into());
        let share = float(world.wrong) / float(world.lookups);
        cells.insert(format!("random_{name}_wrong_share"), share.into());
    }
    cells.insert("wrong_answers".to_owned(), wrong.into());
    cells
}

/// A prompt, one small number a block.
type Path = Vec<u8>;

/// A subject and the model, fed with the same events.
struct World<S: Subject> {
    subject: (S::Writer, S::Reader),
    model: (<Naive as Subject>::Writer, <Naive as Subject>::Reader),
    lookups: u64,
    wrong: u64,
}

impl<S: Subject> World<S> {
    fn new() -> Self {
        let (subject, model) = (S::new(WORKERS), Naive::new(WORKERS));
        Self {
            subject: (subject.writer(), subject.reader()),
            model: (model.writer(), model.reader()),
            lookups: 0,
            wrong: 0,
        }
    }

    fn steps(&mut self) -> Steps<'_> {
        Steps {
            world: self,
            probes: Vec::new(),
        }
    }
}

/// A world whose subject's type does not matter.
trait Play {
    fn apply(&mut self, event: Event);
    fn check(&mut self, path: &[u8]);
}

impl<S: Subject> Play for World<S> {
    fn apply(&mut self, event: Event) {
        drop(self.subject.0.apply(S::event(event.clone())));
        drop(self.model.0.apply(Naive::event(event)));
        self.subject.0.drain();
    }

    fn check(&mut self, path: &[u8]) {
        let locals: Vec<u64> = path.iter().copied().map(local).collect();
        let answer = self.subject.1.answer(&mut S::prompt(&locals));
        let wanted = self.model.1.answer(&mut Naive::prompt(&locals));
        self.lookups += 1;
        self.wrong += u64::from(answer != wanted);
    }
}

fn local(kind: u8) -> u64 {
    mix(u64::from(kind))
}

fn keys(path: &[u8]) -> Vec<u64> {
    engine_hashes(path.iter().copied().map(local))
}

/// The blocks of `path` after the first `known`, stored under the last of those.
fn stored(worker: u32, path: &[u8], known: usize) -> Event {
    let mut keys = keys(path);
    let new = keys.split_off(known);
    Event::Store {
        worker,
        parent: keys.pop(),
        locals: path[known..].iter().copied().map(local).collect(),
        keys: new,
    }
}

fn removed(worker: u32, path: &[u8], ends: impl IntoIterator<Item = usize>) -> Event {
    let (keys, ends) = (keys(path), ends.into_iter());
    Event::Remove {
        worker,
        keys: ends.map(|end| keys[end - 1]).collect(),
    }
}

/// Plays a situation; every prompt met so far is looked up after every step.
struct Steps<'a> {
    world: &'a mut dyn Play,
    probes: Vec<Path>,
}

impl Steps<'_> {
    fn store(&mut self, worker: u32, path: &[u8], known: usize) {
        self.step(path, stored(worker, path, known));
    }

    fn remove(&mut self, worker: u32, path: &[u8], ends: impl IntoIterator<Item = usize>) {
        self.step(path, removed(worker, path, ends));
    }

    fn step(&mut self, path: &[u8], event: Event) {
        if !self.probes.iter().any(|probe| probe == path) {
            self.probes.push(path.to_vec());
        }
        self.world.apply(event);
        for probe in &self.probes {
            self.world.check(probe);
        }
    }
}

/// Sixteen different blocks.
const LONG: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

type Situation = (&'static str, fn(&mut Steps<'_>));

/// What engines do, and what it is called in results.
const SITUATIONS: [Situation; 9] = [
    ("hole", |steps| {
        steps.store(0, &LONG, 0);
        steps.store(1, &LONG, 0);
        steps.remove(0, &LONG, [8]);
    }),
    ("mid_chain_restore", |steps| {
        steps.store(0, &LONG, 0);
        steps.remove(0, &LONG, [7, 8, 9]);
        steps.store(0, &LONG[..9], 6);
    }),
    ("head_eviction", |steps| {
        steps.store(0, &LONG, 0);
        steps.remove(0, &LONG, [1]);
        steps.store(0, &LONG[..1], 0);
    }),
    ("orphan", |steps| {
        steps.store(0, &LONG[..4], 0);
        steps.store(0, &LONG, 8);
        steps.store(0, &LONG[..8], 4);
    }),
    ("orphan_of_a_new_worker", |steps| {
        steps.store(0, &LONG, 8);
        steps.store(0, &LONG[..8], 0);
    }),
    ("duplicate_store", |steps| {
        steps.store(0, &LONG, 0);
        steps.store(0, &LONG, 0);
        steps.remove(0, &LONG, [16]);
        steps.remove(0, &LONG, [16]);
    }),
    // Two workers hold the first four blocks and two hold the next four, but not the same two.
    ("holders_of_equal_number", |steps| {
        let fork = [0, 1, 2, 3, 40, 41];
        steps.store(0, &LONG[..8], 0);
        steps.store(3, &fork, 0);
        steps.store(1, &LONG[..4], 0);
        steps.store(2, &LONG[..8], 0);
        steps.remove(3, &fork, [6, 5, 4, 3, 2, 1]);
        steps.remove(2, &LONG[..8], [4, 3, 2, 1]);
    }),
    ("fork_under_a_hole", |steps| {
        let fork = [0, 1, 2, 3, 4, 5, 40, 41];
        steps.store(0, &LONG, 0);
        steps.remove(0, &LONG, [3]);
        steps.store(0, &fork, 6);
        steps.store(0, &LONG[..3], 2);
    }),
    ("clear_of_one", |steps| {
        steps.store(0, &LONG, 0);
        steps.store(1, &LONG[..12], 0);
        steps.step(&LONG, Event::Clear { worker: 0 });
        steps.store(0, &LONG[..4], 0);
    }),
];

/// Random operations on short paths. Orderly engines announce what they lack and remove what they hold; others do
/// anything: duplicates, unknown parents, removals of what is not there.
fn random_operations(world: &mut dyn Play, operations: u32, is_orderly: bool) {
    let mut rng = Rng::with_seed(0x0070_726f_6265);
    let mut held: HashMap<u32, HashSet<u64>> = HashMap::new();
    for _ in 0..operations {
        let worker = rng.u32(..WORKERS);
        let path = random_path(&mut rng);
        let held = held.entry(worker).or_default();
        let event = match rng.u32(..100) {
            0 => Event::Clear { worker },
            1..40 => {
                let keys = keys(&path);
                let ends: Vec<usize> = (1..=path.len())
                    .filter(|&end| !is_orderly || held.contains(&keys[end - 1]))
                    .filter(|_| rng.u32(..3) == 0)
                    .collect();
                removed(worker, &path, ends)
            }
            _ if is_orderly => orderly_store(worker, &path, held),
            _ => stored(worker, &path, rng.usize(..path.len())),
        };
        note(&event, held);
        world.apply(event);
        world.check(&path);
        world.check(&random_path(&mut rng));
    }
}

/// Stores the first blocks of the path that the worker lacks, up to the next that it holds.
fn orderly_store(worker: u32, path: &[u8], held: &HashSet<u64>) -> Event {
    let keys = keys(path);
    let is_held = |key: &&u64| held.contains(key);
    let known = keys.iter().take_while(is_held).count();
    let new = keys[known..].iter().take_while(|key| !is_held(key)).count();
    stored(worker, &path[..known + new], known)
}

fn note(event: &Event, held: &mut HashSet<u64>) {
    match event {
        Event::Store { keys, .. } => held.extend(keys),
        Event::Remove { keys, .. } => held.retain(|key| !keys.contains(key)),
        Event::Clear { .. } => held.clear(),
    }
}

fn random_path(rng: &mut Rng) -> Path {
    // Mostly the same block again, so that long paths share prefixes.
    let blocks = rng.usize(1..=MAX_BLOCKS);
    (0..blocks)
        .map(|_| {
            if rng.u32(..4) == 0 {
                rng.u8(..KINDS)
            } else {
                0
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subject::Ours;

    #[test]
    fn ours_gives_no_wrong_answer() {
        let plan = Plan {
            operations: 2_000,
            ..Plan::new(true, Name::Ours)
        };
        let cells = measure::<Ours>(&plan);
        assert_eq!(cells["wrong_answers"], 0);
        assert_eq!(cells["random_any_lookups"], 4_000);
    }

    /// An index that answers as if nothing was ever removed.
    struct Forgetful(Ours);

    struct Never<W>(W);

    impl Subject for Forgetful {
        const NAME: Name = Name::Ours;
        type Event = <Ours as Subject>::Event;
        type Prompt = <Ours as Subject>::Prompt;
        type Writer = Never<<Ours as Subject>::Writer>;
        type Reader = <Ours as Subject>::Reader;

        fn new(workers: u32) -> Self {
            Self(Ours::new(workers))
        }

        fn writer(&self) -> Self::Writer {
            Never(self.0.writer())
        }

        fn reader(&self) -> Self::Reader {
            self.0.reader()
        }

        fn event(event: Event) -> Self::Event {
            Ours::event(event)
        }

        fn prompt(locals: &[u64]) -> Self::Prompt {
            Ours::prompt(locals)
        }
    }

    impl<W: Writer<Event = <Ours as Subject>::Event>> Writer for Never<W> {
        type Event = W::Event;

        fn apply(&mut self, event: W::Event) -> Option<W::Event> {
            match format!("{event:?}").starts_with("Remove") {
                true => None,
                false => self.0.apply(event),
            }
        }

        fn remove_worker(&mut self, worker: u32) {
            self.0.remove_worker(worker);
        }
    }

    #[test]
    fn every_situation_that_removes_tells_when_removals_are_lost() {
        let plan = Plan {
            operations: 500,
            ..Plan::new(true, Name::Ours)
        };
        let cells = measure::<Forgetful>(&plan);
        for name in ["hole", "head_eviction", "holders_of_equal_number"] {
            assert_ne!(cells[&format!("probe_{name}")], 0, "{name}");
        }
        assert_ne!(cells["random_orderly_wrong"], 0);
        assert_ne!(cells["random_any_wrong"], 0);
    }

    #[test]
    fn orderly_engines_store_what_they_lack() {
        let (path, mut held) = ([1, 2, 0, 1], HashSet::new());
        note(&orderly_store(0, &path, &held), &mut held);
        assert_eq!(held.len(), 4);
        note(&removed(0, &path, [2]), &mut held);
        let again = orderly_store(0, &path, &held);
        assert_eq!(again, stored(0, &path[..2], 1));
    }
}
