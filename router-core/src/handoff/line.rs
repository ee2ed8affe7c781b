//! A robust line through recent measurements.

use std::collections::VecDeque;

/// A time as a fixed part and a part for each unit of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    /// Seconds whatever the work.
    pub(super) fixed: f64,
    /// Seconds for each unit.
    pub(super) per_unit: f64,
}

impl Fit {
    pub(super) fn seconds(&self, units: f64) -> f64 {
        self.fixed + self.per_unit * units
    }
}

/// Learns `seconds = fixed + units × per_unit` from the latest measurements.
///
/// Where they differ enough in size, by repeated medians: for each measurement the median of its slopes to the others, of those
/// the median, then the median of what is left over. Close to half of the measurements may be wrong without moving the line far.
/// Where they do not, the fixed part is believed as seeded (none without a seed), and each measurement has one vote for
/// what a unit takes; the median wins. A seed stands against a single measurement, has a vote beside two, which so overrule it
/// where they agree, and none beside three.
///
/// What a measurement can tell depends on how much of it is fixed: see [`Telling`].
///
/// # Source
/// A. F. Siegel, "Robust regression using repeated medians", Biometrika 69 (1982), 242-244. The seed's vote is our own: of
/// two measurements on one side of the seed the nearer one wins, and of two on both sides the seed, so that one wrong
/// measurement never does.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    telling: Telling,
    samples: VecDeque<Sample>,
    seed: Option<Fit>,
    fit: Option<Fit>,
    is_measured: bool,
}

/// From what size on a measurement tells what a unit takes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Telling {
    /// Units below which fixed costs hide it.
    pub(super) units: f64,
    /// Seconds below which a measurement tells only that a unit takes no longer: it speaks against a seed that is slower, and for
    /// every other one.
    pub(super) seconds: f64,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    units: f64,
    seconds: f64,
    /// It took no longer than this; how long it took, nobody knows.
    is_bound: bool,
}

/// Measurements kept. More follow a change of the machine more slowly; the fit takes about 4,000 slopes.
const KEPT: usize = 64;
/// Measurements from which slopes are believed: of four, one may be wrong.
const ENOUGH: usize = 4;
/// Fewest slopes of which a median is taken: of two it would be their mean, and one that is wrong would count.
const OUTVOTING: usize = 3;
/// Largest work as a multiple of the smallest from which slopes are believed; noise of a few per cent over a smaller span
/// would turn into a fixed part of the whole time.
const SPAN: f64 = 1.5;

impl Line {
    /// Creates a line that nothing is known of.
    pub(super) fn new(telling: Telling) -> Self {
        Self {
            telling,
            ..Self::default()
        }
    }

    /// Sets what is believed until measurements tell otherwise.
    pub(super) fn seed(&mut self, seed: Fit) {
        self.seed = Some(seed);
        self.refit();
    }

    /// Takes in one measurement; impossible ones are dropped.
    pub(super) fn observe(&mut self, units: f64, seconds: f64) {
        self.take(units, seconds, false);
    }

    /// Takes in that so much work took no longer than this; impossible bounds are dropped.
    pub(super) fn observe_bound(&mut self, units: f64, seconds: f64) {
        self.take(units, seconds, true);
    }

    /// Returns the line, if anything is known.
    pub(super) const fn fit(&self) -> Option<Fit> {
        self.fit
    }

    /// Tells whether measurements tell the line, and not the seed alone.
    pub(super) const fn is_measured(&self) -> bool {
        self.is_measured
    }

    pub(super) fn measurements(&self) -> usize {
        self.samples.len()
    }

    fn take(&mut self, units: f64, seconds: f64, is_bound: bool) {
        let possible = |value: f64| value.is_finite() && value > 0.0;
        if !possible(units) || !possible(seconds) {
            return;
        }
        if self.samples.len() == KEPT {
            self.samples.remove(self.least_needed());
        }
        self.samples.push_back(Sample {
            units,
            seconds,
            is_bound,
        });
        self.refit();
    }

    /// Returns the place of the measurement that gives way: the oldest of those that tell little while they are many, so that
    /// however many of them never drive out what was learned.
    fn least_needed(&self) -> usize {
        let tells_little = |sample: &Sample| sample.is_bound || sample.units < self.telling.units;
        let many = self
            .samples
            .iter()
            .filter(|sample| tells_little(sample))
            .count()
            > KEPT / 2;
        let oldest = self.samples.iter().position(tells_little);
        oldest.filter(|_| many).unwrap_or(0)
    }

    fn refit(&mut self) {
        let measured = self.sloped().or_else(|| self.proportional());
        let is_seeded = |fit: Fit| {
            let seed = self.seed.map(|seed| seed.per_unit.to_bits());
            seed == Some(fit.per_unit.to_bits())
        };
        self.is_measured = measured.is_some_and(|fit| !is_seeded(fit));
        self.fit = measured.or(self.seed);
    }

    fn sloped(&self) -> Option<Fit> {
        let samples: Vec<&Sample> = self.exact().collect();
        let apart = self.spread(&samples)? / 10.0;
        let mut slopes: Vec<f64> = samples
            .iter()
            .filter_map(|one| slope_at(one, &samples, apart))
            .collect();
        if slopes.len() < OUTVOTING {
            return None;
        }
        let per_unit = median(&mut slopes)?;
        let rest = |sample: &&Sample| sample.seconds - sample.units * per_unit;
        let fixed = median(&mut samples.iter().map(rest).collect::<Vec<_>>())?;
        (per_unit > 0.0 && fixed >= 0.0).then_some(Fit { fixed, per_unit })
    }

    /// Returns how far the sizes of measurements lie apart, the smallest and the largest aside: a slope must not hang on one of
    /// them. `None` where that is not enough for slopes.
    fn spread(&self, samples: &[&Sample]) -> Option<f64> {
        let longest = samples
            .iter()
            .map(|sample| sample.seconds)
            .fold(0.0, f64::max);
        if samples.len() < ENOUGH || longest < self.telling.seconds {
            return None;
        }
        let mut sizes: Vec<f64> = samples.iter().map(|sample| sample.units).collect();
        sizes.sort_by(f64::total_cmp);
        let (least, most) = (sizes[1], sizes[sizes.len() - 2]);
        (most >= least * SPAN && most - least >= self.telling.units).then_some(most - least)
    }

    /// Lets each measurement vote. Keeps the seeded fixed part, unless a measurement took less than it.
    fn proportional(&self) -> Option<Fit> {
        let quickest = self.exact().map(|sample| sample.seconds);
        let quickest = quickest.fold(f64::INFINITY, f64::min);
        let seeded = self.seed.map_or(0.0, |seed| seed.fixed);
        let fixed = if seeded < quickest { seeded } else { 0.0 };
        let seed = self.seed.map(|seed| seed.per_unit);
        let telling = self
            .samples
            .iter()
            .filter(|sample| sample.units >= self.telling.units);
        let vote = |sample: &Sample| {
            let own = (sample.seconds - fixed) / sample.units;
            let is_bound = sample.is_bound || sample.seconds < self.telling.seconds;
            match seed {
                Some(seed) if is_bound => Some(own.min(seed)),
                None if sample.is_bound => None,
                _ => Some(own),
            }
        };
        let mut votes: Vec<f64> = telling.filter_map(vote).collect();
        match (seed, votes.len()) {
            (Some(_), 0 | 1) => return None,
            (Some(seed), 2) => votes.push(seed),
            _ => {}
        }
        let per_unit = median(&mut votes)?;
        (per_unit > 0.0).then_some(Fit { fixed, per_unit })
    }

    fn exact(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter().filter(|sample| !sample.is_bound)
    }
}

/// Returns the median of the slopes from one measurement to the others that lie `apart` of it, if they are enough.
fn slope_at(one: &Sample, others: &[&Sample], apart: f64) -> Option<f64> {
    let slope = |other: &&Sample| {
        let run = other.units - one.units;
        (run.abs() >= apart).then(|| (other.seconds - one.seconds) / run)
    };
    let mut slopes: Vec<f64> = others.iter().filter_map(slope).collect();
    if slopes.len() < OUTVOTING {
        return None;
    }
    median(&mut slopes)
}

/// The latest values, of which the median is asked.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent {
    values: VecDeque<f64>,
    median: Option<f64>,
}

impl Recent {
    /// Takes in one value; impossible ones are dropped.
    pub(super) fn observe(&mut self, value: f64) {
        if !value.is_finite() || value < 0.0 {
            return;
        }
        if self.values.len() == KEPT {
            self.values.pop_front();
        }
        self.values.push_back(value);
        self.median = median(&mut self.values.iter().copied().collect::<Vec<_>>());
    }

    pub(super) const fn median(&self) -> Option<f64> {
        self.median
    }

    pub(super) fn len(&self) -> usize {
        self.values.len()
    }
}

/// Returns the median (the mean of the middle two of an even number), in linear time.
fn median(values: &mut [f64]) -> Option<f64> {
    let middle = values.len() / 2;
    if values.is_empty() {
        return None;
    }
    let odd = values.len() % 2 == 1;
    let (below, &mut upper, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    if odd {
        return Some(upper);
    }
    let lower = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Some(f64::midpoint(lower, upper))
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    fn learned(samples: impl IntoIterator<Item = (f64, f64)>) -> Fit {
        let mut line = Line::default();
        for (units, seconds) in samples {
            line.observe(units, seconds);
        }
        line.fit().unwrap()
    }

    fn close(value: f64, expected: f64, share: f64) -> bool {
        (value / expected - 1.0).abs() <= share
    }

    #[test]
    fn a_line_is_found_under_noise_and_outliers() {
        let mut rng = Rng::with_seed(5);
        let fit = learned((0..64).map(|at| {
            let units = 500.0 + 300.0 * f64::from(at % 20);
            let noise = 1.0 + 0.05 * (rng.f64() - 0.5);
            // Every fifth measurement takes ten times as long.
            let wrong = if at % 5 == 0 { 10.0 } else { 1.0 };
            (units, (0.05 + units / 20_000.0) * noise * wrong)
        }));
        assert!(close(fit.per_unit, 1.0 / 20_000.0, 0.1), "{fit:?}");
        assert!(close(fit.seconds(12_000.0), 0.65, 0.1), "{fit:?}");
    }

    #[test]
    fn one_length_alone_is_taken_as_proportional() {
        let fit = learned([(8_000.0, 0.22), (8_000.0, 0.21), (8_100.0, 0.9)]);
        assert!(
            fit.fixed == 0.0 && close(fit.seconds(16_000.0), 0.44, 0.01),
            "{fit:?}"
        );
    }

    #[test]
    fn a_seed_stands_against_one_measurement_and_keeps_its_fixed_part() {
        let mut line = Line::default();
        let seed = Fit {
            fixed: 0.5,
            per_unit: 0.001,
        };
        line.seed(seed);
        line.observe(1_000.0, 2.5);
        assert_eq!((line.fit(), line.is_measured()), (Some(seed), false));
        line.observe(1_000.0, 2.5);
        assert!(line.is_measured());
        assert_eq!(
            line.fit(),
            Some(Fit {
                fixed: 0.5,
                per_unit: 0.002
            })
        );
        // Contradicted by a measurement below it.
        line.observe(1_000.0, 0.4);
        assert!(line.fit().unwrap().fixed == 0.0);
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "speeds of tests are small"
    )]
    fn as_whole(speed: f64) -> u64 {
        speed.round() as u64
    }

    /// Returns the speed that is believed after each measurement, of a line seeded with 100 units a second.
    fn speeds_after(telling: Telling, samples: &[(f64, f64)]) -> Vec<u64> {
        let mut line = Line::new(telling);
        line.seed(Fit {
            fixed: 0.0,
            per_unit: 0.01,
        });
        let after = |(units, seconds): &(f64, f64)| {
            line.observe(*units, *seconds);
            as_whole(1.0 / line.fit().unwrap().per_unit)
        };
        samples.iter().map(after).collect()
    }

    #[test]
    fn two_measurements_that_agree_overrule_a_seed_and_one_that_is_wrong_never_does() {
        let speeds = |samples: &[(f64, f64)]| speeds_after(Telling::default(), samples);
        // Ten times too fast, and ten times too slow.
        assert_eq!(speeds(&[(500.0, 50.0), (1_000.0, 100.0)]), [100, 10]);
        assert_eq!(speeds(&[(500.0, 0.5), (1_000.0, 1.0)]), [100, 1_000]);
        // The first brings a handshake of 50 s with it: the seed is right, then wrong.
        assert_eq!(
            speeds(&[(500.0, 55.0), (500.0, 5.0), (500.0, 5.0)]),
            [100, 100, 100]
        );
        assert_eq!(
            speeds(&[(500.0, 100.0), (500.0, 50.0), (900.0, 90.0)]),
            [100, 10, 10]
        );
        // One of four, whichever and wherever it is.
        let sizes = [200.0, 400.0, 700.0, 900.0];
        for wrong in 0..4 {
            for factor in [0.05, 20.0] {
                let mut samples = sizes.map(|size| (size, size / 10.0));
                samples[wrong].1 *= factor;
                assert_eq!(speeds(&samples)[3], 10, "{wrong} {factor}");
            }
        }
    }

    #[test]
    fn what_is_mostly_fixed_tells_no_speed() {
        let telling = Telling {
            units: 1_000.0,
            seconds: 0.0,
        };
        let mut line = Line::new(telling);
        // 15 ms and 20,000 units a second: a prompt of 20 looks like 1,250 a second.
        let took = |units: f64| 0.015 + units / 20_000.0;
        for units in [20.0, 60.0, 35.0, 500.0, 20.0, 900.0] {
            line.observe(units, took(units));
            assert_eq!(line.fit(), None);
        }
        line.observe(1_500.0, took(1_500.0));
        // 90 ms for 1,500, and nothing that is fixed: a fifth too slow.
        assert!(close(line.fit().unwrap().per_unit, 0.00006, 0.001));
        line.observe(2_500.0, took(2_500.0));
        let fit = line.fit().unwrap();
        assert!(
            close(fit.per_unit, 0.00005, 0.001) && close(fit.fixed, 0.015, 0.001),
            "{fit:?}"
        );
    }

    #[test]
    fn what_was_quick_speaks_against_a_slower_seed_only() {
        let telling = Telling {
            units: 0.0,
            seconds: 0.05,
        };
        // A unit in 40 ms is 25 a second, if nothing of it is fixed.
        let small = [(1.0, 0.04); 5];
        assert_eq!(speeds_after(telling, &small), [100; 5]);
        // 100 units in as long are at least 2,500 a second.
        let large = [(100.0, 0.04); 3];
        assert_eq!(speeds_after(telling, &large), [100, 2_500, 2_500]);
        // Quick ones of two sizes tell no slope either.
        let both = [(1.0, 0.04), (1.0, 0.03), (2.0, 0.031), (2.0, 0.041)];
        assert_eq!(speeds_after(telling, &both), [100; 4]);
    }

    #[test]
    fn a_bound_speaks_against_a_slower_seed_only_and_tells_nothing_alone() {
        let mut line = Line::default();
        line.observe_bound(100.0, 2.0);
        line.observe_bound(100.0, 2.0);
        assert_eq!(line.fit(), None);
        line.seed(Fit {
            fixed: 0.0,
            per_unit: 0.01,
        });
        assert!(close(line.fit().unwrap().per_unit, 0.01, 1e-9));
        line.observe_bound(1_000.0, 2.0);
        line.observe_bound(1_000.0, 2.0);
        line.observe_bound(1_000.0, 2.0);
        assert!(close(line.fit().unwrap().per_unit, 0.002, 1e-9));
    }

    #[test]
    fn of_two_sizes_one_wrong_measurement_moves_nothing() {
        let right = [(2_000.0, 0.2), (4_000.0, 0.4)];
        for counts in [[2, 2], [2, 3], [3, 2], [3, 3], [4, 4]] {
            for (which, wrong) in right.into_iter().enumerate() {
                for factor in [0.05, 0.4, 20.0] {
                    let mut line = Line::default();
                    line.observe(wrong.0, wrong.1 * factor);
                    for (at, ((units, seconds), count)) in right.into_iter().zip(counts).enumerate()
                    {
                        for _ in usize::from(at == which)..count {
                            line.observe(units, seconds);
                        }
                    }
                    let fit = line.fit().unwrap();
                    let message = format!("{counts:?} {wrong:?} {factor}: {fit:?}");
                    assert!(close(fit.per_unit, 1e-4, 0.01), "{message}");
                    assert!(fit.fixed < 1e-6, "{message}");
                }
            }
        }
    }

    #[test]
    fn however_many_that_tell_little_leave_what_was_learned() {
        let telling = Telling {
            units: 1_024.0,
            seconds: 0.0,
        };
        let mut line = Line::new(telling);
        for _ in 0..3 {
            line.observe(4_000.0, 0.4);
        }
        for _ in 0..3 * KEPT {
            line.observe(300.0, 0.03);
        }
        assert!(close(line.fit().unwrap().per_unit, 1e-4, 0.01));
        // Those that tell give way to the newer of their kind alone.
        for _ in 0..KEPT {
            line.observe(4_000.0, 0.8);
        }
        assert!(close(line.fit().unwrap().per_unit, 2e-4, 0.05));
        for _ in 0..3 * KEPT {
            line.observe_bound(4_000.0, 0.1);
        }
        assert!(close(line.fit().unwrap().per_unit, 2e-4, 0.05));
    }

    #[test]
    fn old_measurements_give_way() {
        let slow = (0..64).map(|_| (1_000.0, 1.0));
        let quick = (0..40).map(|_| (1_000.0, 0.1));
        assert!(close(learned(slow.chain(quick)).per_unit, 0.0001, 0.01));
    }

    #[test]
    fn impossible_measurements_are_dropped() {
        let mut line = Line::default();
        for (units, seconds) in [
            (0.0, 1.0),
            (1.0, 0.0),
            (-1.0, 1.0),
            (f64::NAN, 1.0),
            (1.0, f64::INFINITY),
        ] {
            line.observe(units, seconds);
        }
        assert_eq!((line.fit(), line.measurements()), (None, 0));
    }

    #[test]
    fn medians_of_any_number() {
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [3.0]), Some(3.0));
        assert_eq!(median(&mut [4.0, 1.0]), Some(2.5));
        assert_eq!(median(&mut [9.0, 1.0, 2.0]), Some(2.0));
    }
}
