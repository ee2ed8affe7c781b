use std::cell::RefCell;

use super::*;

/// A fleet that remembers, and refuses what no manager should ask for.
#[derive(Default)]
struct Fake {
    there: RefCell<BTreeMap<WorkerId, Life>>,
    busy: RefCell<BTreeSet<WorkerId>>,
    refuses: RefCell<BTreeSet<WorkerId>>,
    lives: RefCell<u64>,
}

#[derive(Clone, Debug, PartialEq)]
struct Life {
    number: u64,
    sighting: Sighting,
    source: String,
    listed: bool,
}

impl Fake {
    fn life(&self, id: &str) -> Option<Life> {
        self.there.borrow().get(id).cloned()
    }

    fn change(&self, id: &WorkerId, change: impl FnOnce(&mut Life)) {
        let mut there = self.there.borrow_mut();
        change(
            there
                .get_mut(id)
                .expect("a change of a worker that is there"),
        );
    }
}

impl Hands for Fake {
    fn add(&self, sighting: &Sighting, source: &Arc<str>) -> kvlane::Result<()> {
        let id = &sighting.worker.id;
        if self.refuses.borrow().contains(id) {
            return Err(kvlane::Error::new(
                kvlane::ErrorKind::InvalidRequest,
                "too many ranks",
            ));
        }
        *self.lives.borrow_mut() += 1;
        let life = Life {
            number: *self.lives.borrow(),
            sighting: sighting.clone(),
            source: source.to_string(),
            listed: true,
        };
        let before = self.there.borrow_mut().insert(id.clone(), life);
        assert_eq!(before, None, "added twice");
        Ok(())
    }

    fn remove(&self, id: &WorkerId, _why: &str) {
        assert!(self.there.borrow_mut().remove(id).is_some());
    }

    fn learn(&self, id: &WorkerId, fact: Fact) {
        self.change(id, |life| match fact {
            Fact::Phase(phase) => life.sighting.phase = phase,
            Fact::Listed(listed) => life.listed = listed,
            other => panic!("no source says {other:?}"),
        });
    }

    fn set_role(&self, id: &WorkerId, role: Role) {
        self.change(id, |life| life.sighting.worker.give(Some(role), None));
    }

    fn set_labels(&self, id: &WorkerId, labels: BTreeMap<String, String>) {
        self.change(id, |life| life.sighting.worker.labels = labels);
    }

    fn is_described_by(&self, id: &WorkerId, other: &WorkerConfig) -> bool {
        let there = self.there.borrow();
        there[id].sighting.worker.is_described_by(other)
    }

    fn hand_over(&self, id: &WorkerId, source: &Arc<str>, instance: &str) {
        self.change(id, |life| {
            life.source = source.to_string();
            life.sighting.instance = instance.to_owned();
        });
    }

    fn is_done(&self, id: &WorkerId) -> bool {
        !self.busy.borrow().contains(id)
    }
}

/// A manager with the sources `file` (whose workers leave) and `pods` (whose workers end), and a clock.
struct Bench {
    manager: Manager,
    hands: Fake,
    file: SourceId,
    pods: SourceId,
    now: Instant,
}

const DRAIN: Duration = Duration::from_secs(60);

impl Bench {
    fn new() -> Self {
        let manager = Manager::new(DRAIN);
        let (file, _) = manager.attach("file", Absence::Left);
        let (pods, _) = manager.attach("pods", Absence::Ended);
        Self {
            manager,
            hands: Fake::default(),
            file,
            pods,
            now: Instant::now(),
        }
    }

    fn listed(&self, source: SourceId, list: &[Sighting]) {
        let list = list.to_vec();
        self.manager.listed(source, list, &self.hands, self.now);
    }

    fn pass(&mut self, seconds: f64) {
        self.now += Duration::from_secs_f64(seconds);
        self.manager.tick(&self.hands, self.now);
    }

    fn number(&self, id: &str) -> Option<u64> {
        self.hands.life(id).map(|life| life.number)
    }

    fn dismiss(&self, id: &str) -> bool {
        self.manager.dismiss(&self::id(id), &self.hands, self.now)
    }
}

fn id(id: &str) -> WorkerId {
    WorkerId::new(id).unwrap()
}

fn seen(id: &str, instance: &str) -> Sighting {
    Sighting {
        worker: WorkerConfig::new(id, "http://h:1").unwrap(),
        instance: instance.to_owned(),
        phase: Phase::Serving,
    }
}

fn leaving(id: &str, instance: &str) -> Sighting {
    Sighting {
        phase: Phase::Leaving,
        ..seen(id, instance)
    }
}

fn at(sighting: Sighting, url: &str) -> Sighting {
    let mut moved = sighting;
    moved.worker.url = crate::net::WorkerUrl::parse(url).unwrap();
    moved
}

#[test]
fn another_instance_or_address_is_another_life_and_a_role_is_not() {
    let bench = Bench::new();
    bench.listed(bench.pods, &[seen("a", "1")]);
    assert_eq!(bench.number("a"), Some(1));
    let mut other_role = seen("a", "1");
    other_role.worker.give(Some(Role::Prefill), None);
    other_role.worker.labels.insert("zone".into(), "x".into());
    bench.listed(bench.pods, &[other_role.clone()]);
    let life = bench.hands.life("a").unwrap();
    assert_eq!((life.number, life.sighting), (1, other_role));
    bench.listed(bench.pods, &[seen("a", "2")]);
    assert_eq!(bench.number("a"), Some(2));
    bench.listed(bench.pods, &[at(seen("a", "2"), "http://h:2")]);
    assert_eq!(bench.number("a"), Some(3));
    let mut other_events = at(seen("a", "2"), "http://h:2");
    other_events.worker.events = Some("tcp://h:5557".to_owned());
    bench.listed(bench.pods, &[other_events]);
    assert_eq!(bench.number("a"), Some(4));
}

#[test]
fn an_operators_role_stands_until_the_source_says_another() {
    let bench = Bench::new();
    bench.listed(bench.file, &[seen("a", "")]);
    bench.hands.set_role(&id("a"), Role::Decode);
    bench.listed(bench.file, &[seen("a", ""), seen("b", "")]);
    let role = || bench.hands.life("a").unwrap().sighting.worker.role;
    assert_eq!(role(), Role::Decode);
    let mut prefill = seen("a", "");
    prefill.worker.role = Role::Prefill;
    bench.listed(bench.file, &[prefill]);
    assert_eq!(role(), Role::Prefill);
}

#[test]
fn one_that_leaves_finishes_what_it_has() {
    let mut bench = Bench::new();
    bench.listed(bench.pods, &[seen("a", "1"), seen("b", "1")]);
    bench.hands.busy.borrow_mut().insert(id("a"));
    bench.listed(bench.pods, &[leaving("a", "1"), leaving("b", "1")]);
    assert!(bench.number("b").is_some(), "a request may be on its way");
    bench.pass(0.25);
    assert_eq!((bench.number("a"), bench.number("b")), (Some(1), None));
    bench.listed(bench.pods, &[leaving("a", "1"), leaving("b", "1")]);
    assert_eq!(
        bench.number("b"),
        None,
        "one that leaves is not added again"
    );
    bench.pass(59.0);
    assert_eq!(bench.number("a"), Some(1));
    bench.pass(1.0);
    assert_eq!(bench.number("a"), None, "its 60 seconds are up");
}

#[test]
fn one_that_stays_after_all_keeps_its_life() {
    let mut bench = Bench::new();
    bench.listed(bench.file, &[seen("a", "")]);
    bench.hands.busy.borrow_mut().insert(id("a"));
    bench.listed(bench.file, &[]);
    assert!(!bench.hands.life("a").unwrap().listed);
    bench.pass(30.0);
    bench.listed(bench.file, &[seen("a", "")]);
    bench.hands.busy.borrow_mut().clear();
    bench.pass(90.0);
    let life = bench.hands.life("a").unwrap();
    assert!(life.listed && life.number == 1);
}

#[test]
fn one_whose_source_knows_that_it_ended_goes_at_once() {
    let bench = Bench::new();
    bench.listed(bench.pods, &[seen("a", "1")]);
    bench.hands.busy.borrow_mut().insert(id("a"));
    bench.listed(bench.pods, &[]);
    assert_eq!(bench.number("a"), None);
}

#[test]
fn of_two_sources_the_first_keeps_a_name_and_the_second_is_reported() {
    let mut bench = Bench::new();
    bench.listed(bench.pods, &[at(seen("a", "p"), "http://pod:1")]);
    bench.listed(bench.file, &[at(seen("a", ""), "http://file:1")]);
    assert_eq!(bench.hands.life("a").unwrap().source, "pods");
    let conflict = Conflict {
        id: id("a"),
        source: "file".into(),
        owner: "pods".into(),
    };
    assert_eq!(bench.manager.report().conflicts, [conflict]);
    bench.listed(bench.pods, &[]);
    assert_eq!(bench.hands.life("a").unwrap().source, "file");
    assert_eq!(bench.manager.report().conflicts, []);
    bench.listed(bench.pods, &[at(seen("a", "p"), "http://pod:1")]);
    bench.listed(bench.file, &[]);
    assert_eq!(
        bench.hands.life("a").unwrap().source,
        "file",
        "it finishes what it has first"
    );
    bench.pass(1.0);
    assert_eq!(bench.hands.life("a").unwrap().source, "pods");
}

#[test]
fn an_operators_worker_is_a_source_of_its_own() {
    let bench = Bench::new();
    let add = |id: &str| {
        let worker = seen(id, "").worker;
        bench.manager.add(worker, &bench.hands, bench.now)
    };
    add("a").unwrap();
    assert!(matches!(add("a"), Err(ChangeError::Taken { source }) if &*source == "admin"));
    bench.listed(bench.file, &[seen("a", "")]);
    assert_eq!(bench.hands.life("a").unwrap().source, "admin");
    bench.hands.refuses.borrow_mut().insert(id("b"));
    assert!(matches!(add("b"), Err(ChangeError::Refused(_))));
    bench.hands.refuses.borrow_mut().clear();
    add("b").unwrap();
    assert!(bench.dismiss("a") && !bench.dismiss("a"));
    assert_eq!(
        bench.number("a"),
        None,
        "the file's does not take its place"
    );
    add("a").unwrap();
    assert_eq!(bench.hands.life("a").unwrap().source, "admin");
}

#[test]
fn one_that_an_operator_removed_stays_away_until_it_lives_anew() {
    let bench = Bench::new();
    bench.listed(bench.pods, &[seen("a", "1"), seen("b", "1")]);
    assert!(bench.dismiss("a"));
    bench.listed(
        bench.pods,
        &[seen("a", "1"), seen("b", "1"), seen("c", "1")],
    );
    assert_eq!((bench.number("a"), bench.number("c")), (None, Some(3)));
    let report = bench.manager.report();
    assert_eq!(report.sources[2].dismissed, ["a"]);
    bench.listed(bench.pods, &[seen("a", "2")]);
    assert_eq!(bench.number("a"), Some(4));
    assert!(bench.dismiss("a"));
    bench.listed(bench.pods, &[]);
    bench.listed(bench.pods, &[seen("a", "2")]);
    assert_eq!(bench.number("a"), Some(5));
}

#[test]
fn one_that_cannot_be_added_is_named_and_tried_again_with_the_next_list() {
    let bench = Bench::new();
    bench.hands.refuses.borrow_mut().insert(id("a"));
    bench.listed(bench.file, &[seen("a", ""), seen("b", "")]);
    let report = bench.manager.report();
    assert_eq!(report.sources[1].refused["a"], "too many ranks");
    assert_eq!(
        (report.sources[1].listed, report.sources[1].members),
        (2, 1)
    );
    bench.hands.refuses.borrow_mut().clear();
    bench.listed(bench.file, &[seen("a", ""), seen("b", "")]);
    assert!(bench.number("a").is_some());
    assert!(bench.manager.report().sources[1].refused.is_empty());
}

#[test]
fn another_source_that_lists_the_same_process_goes_on_with_it() {
    let mut bench = Bench::new();
    let (dns, _) = bench.manager.attach("dns", Absence::Left);
    let mut said = seen("a", "");
    said.worker.events = Some("tcp://h:5557".to_owned());
    said.worker.give(Some(Role::Prefill), None);
    let nixl = BTreeMap::from([("connector".to_owned(), "nixl".to_owned())]);
    said.worker.labels.clone_from(&nixl);
    bench.listed(bench.file, &[said.clone()]);
    // A name server knows an address and nothing else.
    bench.listed(dns, &[seen("a", "")]);
    bench.listed(bench.file, &[]);
    let life = bench.hands.life("a").unwrap();
    assert_eq!((life.number, &*life.source, life.listed), (1, "dns", true));
    assert_eq!(life.sighting.worker.role, Role::Prefill);
    assert_eq!(life.sighting.worker.labels, nixl);
    assert_eq!(bench.manager.report().conflicts, []);
    bench.listed(dns, &[seen("a", "")]);
    assert_eq!(
        bench.hands.life("a").unwrap().sighting.worker.labels,
        nixl,
        "its next list says no labels either"
    );
    bench.listed(bench.file, &[said]);
    bench.listed(dns, &[]);
    let life = bench.hands.life("a").unwrap();
    assert_eq!((life.number, &*life.source), (1, "file"));
    bench.listed(bench.file, &[]);
    assert!(!bench.hands.life("a").unwrap().listed);
    // Nobody listed it for a moment, and it is still there.
    let mut decode = seen("a", "");
    decode.worker.give(Some(Role::Decode), None);
    decode.worker.labels.insert("zone".into(), "x".into());
    bench.listed(dns, &[decode]);
    bench.pass(90.0);
    let life = bench.hands.life("a").unwrap();
    assert_eq!((life.number, &*life.source, life.listed), (1, "dns", true));
    assert_eq!(life.sighting.worker.role, Role::Decode);
    assert_eq!(life.sighting.worker.labels["zone"], "x");
}

#[test]
fn another_process_is_not_gone_on_with() {
    let other_place = at(seen("a", ""), "http://h:2");
    let mut other_events = seen("a", "");
    other_events.worker.events = Some("tcp://h:1".to_owned());
    for second in [other_place, other_events, seen("a", "uid-2/0")] {
        let mut bench = Bench::new();
        let (dns, _) = bench.manager.attach("dns", Absence::Left);
        bench.listed(bench.file, &[seen("a", "uid-1/0")]);
        bench.listed(dns, std::slice::from_ref(&second));
        bench.listed(bench.file, &[]);
        let life = bench.hands.life("a").unwrap();
        assert_eq!((life.number, life.listed), (1, false), "{second:?}");
        bench.pass(1.0);
        assert_eq!(bench.number("a"), Some(2), "{second:?}");
    }
}

#[test]
fn a_process_that_began_anew_unseen_by_its_source_is_another_life_to_the_next_one() {
    let mut bench = Bench::new();
    let (slices, _) = bench.manager.attach("slices", Absence::Left);
    bench.listed(bench.file, &[seen("a", "")]);
    for restarts in ["uid-1/0", "uid-1/1"] {
        bench.listed(slices, &[seen("a", restarts)]);
    }
    bench.listed(bench.file, &[]);
    bench.pass(1.0);
    assert_eq!(bench.number("a"), Some(2));
    // The second source now tells of lives in fewer words than the first.
    bench.listed(bench.file, &[seen("a", "uid-1")]);
    bench.listed(slices, &[]);
    bench.pass(1.0);
    assert_eq!(bench.number("a"), Some(2));
    assert!(!may_be_one_instance("uid-1", "uid-10"));
}

#[test]
fn a_restart_that_a_former_owner_tells_of_is_another_life() {
    for is_listed_before in [true, false] {
        let mut bench = Bench::new();
        let (dns, _) = bench.manager.attach("dns", Absence::Left);
        bench.listed(bench.file, &[seen("a", "uid-1")]);
        if is_listed_before {
            bench.listed(dns, &[seen("a", "")]);
            bench.listed(bench.file, &[]);
        } else {
            bench.listed(bench.file, &[]);
            bench.listed(dns, &[seen("a", "")]);
        }
        bench.pass(90.0);
        let life = bench.hands.life("a").unwrap();
        assert_eq!((life.number, &*life.source), (1, "dns"));
        bench.listed(bench.file, &[seen("a", "uid-1")]);
        assert_eq!(bench.number("a"), Some(1), "the same process");
        bench.listed(bench.file, &[seen("a", "uid-2")]);
        let life = bench.hands.life("a").unwrap();
        assert_eq!((life.number, &*life.source), (2, "file"));
        bench.listed(bench.file, &[seen("a", "uid-2")]);
        bench.listed(bench.file, &[]);
        let life = bench.hands.life("a").unwrap();
        assert_eq!((life.number, &*life.source, life.listed), (2, "dns", true));
    }
}

#[test]
fn what_a_former_owner_called_a_life_is_not_forgotten_over_a_source_of_fewer_words() {
    let mut bench = Bench::new();
    let (dns, _) = bench.manager.attach("dns", Absence::Left);
    let (slices, _) = bench.manager.attach("slices", Absence::Left);
    bench.listed(bench.file, &[seen("a", "uid-1")]);
    bench.listed(dns, &[seen("a", "")]);
    bench.listed(bench.file, &[]);
    bench.listed(slices, &[seen("a", "uid-2")]);
    bench.listed(dns, &[]);
    assert!(!bench.hands.life("a").unwrap().listed);
    bench.pass(1.0);
    assert_eq!(bench.number("a"), Some(2));
}

#[test]
fn one_that_is_about_to_go_does_not_stay_for_a_source_that_is_late() {
    let mut bench = Bench::new();
    let (dns, _) = bench.manager.attach("dns", Absence::Left);
    bench.hands.busy.borrow_mut().insert(id("a"));
    bench.listed(bench.file, &[seen("a", "")]);
    bench.listed(dns, &[seen("a", "")]);
    bench.listed(bench.file, &[leaving("a", "")]);
    bench.listed(bench.file, &[]);
    let life = bench.hands.life("a").unwrap();
    assert_eq!(
        (life.number, life.sighting.phase, life.listed),
        (1, Phase::Leaving, false)
    );
    bench.hands.busy.borrow_mut().clear();
    bench.pass(1.0);
    assert_eq!(bench.number("a"), Some(2), "it finished what it had first");
}

/// No source here tells of another life, so a life may only end while nobody lists its name.
#[test]
fn in_a_thousand_random_orders_no_life_ends_while_some_source_lists_it() {
    let names = ["a", "b", "c", "d"];
    let (mut kept, mut ended) = (0, 0);
    for seed in 0..1_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bench = Bench::new();
        let (dns, _) = bench.manager.attach("dns", Absence::Left);
        let (slices, _) = bench.manager.attach("slices", Absence::Left);
        let sources = [
            (bench.file, "file", ""),
            (dns, "dns", ""),
            (slices, "slices", "uid"),
        ];
        let mut last: [BTreeSet<&str>; 3] = Default::default();
        let mut lives: BTreeMap<&str, u64> = BTreeMap::new();
        for _ in 0..random.usize(10..60) {
            if random.f64() < 0.4 {
                bench.pass(random.f64() * 40.0);
            } else {
                let index = random.usize(..3);
                let (source, _, instance) = sources[index];
                last[index] = names.into_iter().filter(|_| random.bool()).collect();
                let list = last[index].iter().map(|id| {
                    let mut sighting = seen(id, instance);
                    let role = [Role::Prefill, Role::Decode][random.usize(..2)];
                    sighting.worker.give(Some(role), None);
                    sighting
                });
                let list: Vec<_> = list.collect();
                bench.listed(source, &list);
            }
            for id in names {
                let listing = sources
                    .iter()
                    .zip(&last)
                    .filter(|(_, list)| list.contains(id));
                let listing: Vec<&str> = listing.map(|((_, name, _), _)| *name).collect();
                if listing.is_empty() {
                    ended += usize::from(lives.remove(id).is_some());
                    continue;
                }
                let life = bench.hands.life(id).expect("somebody lists it");
                assert!(
                    life.listed && listing.contains(&&*life.source),
                    "seed {seed}"
                );
                let before = *lives.entry(id).or_insert(life.number);
                assert_eq!(life.number, before, "seed {seed}: {id} of {listing:?}");
                kept += 1;
            }
        }
    }
    assert!(kept > 50_000 && ended > 1_000, "{kept}, {ended}");
}

/// What a source may say at random of 5 names.
fn random_list(random: &mut fastrand::Rng) -> Vec<Sighting> {
    let mut list = Vec::new();
    for id in ["a", "b", "c", "d", "e"] {
        if random.f64() < 0.4 {
            continue;
        }
        let mut sighting = seen(id, ["", "1", "2"][random.usize(..3)]);
        let role = [Role::Both, Role::Prefill, Role::Decode][random.usize(..3)];
        sighting.worker.give(Some(role), None);
        sighting.phase = [
            Phase::Starting,
            Phase::Serving,
            Phase::Serving,
            Phase::Leaving,
        ][random.usize(..4)];
        if random.f64() < 0.2 {
            sighting = at(sighting, "http://other:1");
        }
        list.push(sighting);
    }
    list
}

#[test]
fn a_thousand_random_orders_end_with_exactly_the_listed_workers() {
    let mut conflicts_seen = 0;
    for seed in 0..1_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bench = Bench::new();
        let (more, _) = bench.manager.attach("dns", Absence::Left);
        let sources = [bench.file, bench.pods, more];
        let names = ["file", "pods", "dns"];
        let mut last: [Vec<Sighting>; 3] = Default::default();
        for _ in 0..random.usize(5..40) {
            match random.usize(..10) {
                0..6 => {
                    let index = random.usize(..3);
                    last[index] = random_list(&mut random);
                    bench.listed(sources[index], &last[index]);
                }
                6 => {
                    let mut busy = bench.hands.busy.borrow_mut();
                    busy.clear();
                    busy.extend(random_list(&mut random).into_iter().map(|of| of.worker.id));
                }
                _ => bench.pass(random.f64() * 40.0),
            }
        }
        // Whatever was open: every drain is over by then, and names that were waited for are taken.
        bench.pass(DRAIN.as_secs_f64());
        bench.pass(DRAIN.as_secs_f64());
        let there = bench.hands.there.borrow();
        let mut conflicts = BTreeSet::new();
        for id in ["a", "b", "c", "d", "e"] {
            let of = |list: &Vec<Sighting>| {
                list.iter()
                    .find(|seen| seen.worker.id.as_str() == id)
                    .cloned()
            };
            let listed: Vec<(&str, Sighting)> = names
                .into_iter()
                .zip(&last)
                .filter_map(|(name, list)| Some((name, of(list)?)))
                .collect();
            let wanted = listed.iter().any(|(_, of)| of.phase != Phase::Leaving);
            let life = there.get(id);
            assert_eq!(life.is_some(), wanted, "seed {seed}: {id} of {listed:?}");
            let Some(life) = life else { continue };
            let owner = listed.iter().find(|(name, _)| *name == life.source);
            let (_, sighting) = owner.expect("the owner lists it");
            assert_eq!(life.sighting, *sighting, "seed {seed}");
            assert!(life.listed && sighting.phase != Phase::Leaving);
            for (name, _) in listed.iter().filter(|(name, _)| *name != life.source) {
                conflicts.insert((id.to_owned(), (*name).to_owned(), life.source.clone()));
            }
        }
        conflicts_seen += conflicts.len();
        let reported = bench.manager.report().conflicts.into_iter();
        let reported: BTreeSet<_> = reported
            .map(|of| {
                (
                    of.id.to_string(),
                    of.source.to_string(),
                    of.owner.to_string(),
                )
            })
            .collect();
        assert_eq!(reported, conflicts, "seed {seed}");
    }
    assert!(conflicts_seen > 1_000, "{conflicts_seen}");
}
