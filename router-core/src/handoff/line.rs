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
/// Median of pairwise slopes, then median of what is left over: up to 29 % of the measurements may be arbitrarily wrong
/// without moving the line far. Where measurements lie too close together to tell the fixed part from the rest, the fixed
/// part is believed as seeded (none without a seed). Until enough is measured a seed counts alone.
///
/// # Source
/// P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968), 1379-1389.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    samples: VecDeque<(f64, f64)>,
    seed: Option<Fit>,
    fit: Option<Fit>,
}

/// Measurements kept. More follow a change of the machine more slowly; the fit takes about 2,000 slopes.
const KEPT: usize = 64;
/// Measurements that replace a seed: with three, one may be wrong.
const ENOUGH: usize = 3;
/// Largest work as a multiple of the smallest from which slopes are believed; noise of a few per cent over a smaller span
/// would turn into a fixed part of the whole time.
const SPAN: f64 = 1.5;

impl Line {
    /// Sets what is believed until enough is measured.
    pub(super) fn seed(&mut self, seed: Fit) {
        self.seed = Some(seed);
        self.refit();
    }

    /// Takes in one measurement; impossible ones are dropped.
    pub(super) fn observe(&mut self, units: f64, seconds: f64) {
        let possible = |value: f64| value.is_finite() && value > 0.0;
        if !possible(units) || !possible(seconds) {
            return;
        }
        if self.samples.len() == KEPT {
            self.samples.pop_front();
        }
        self.samples.push_back((units, seconds));
        self.refit();
    }

    /// Returns the line, if anything is known.
    pub(super) const fn fit(&self) -> Option<Fit> {
        self.fit
    }

    pub(super) fn measurements(&self) -> usize {
        self.samples.len()
    }

    fn refit(&mut self) {
        self.fit = if self.samples.len() < ENOUGH && self.seed.is_some() {
            self.seed
        } else {
            self.sloped().or_else(|| self.proportional())
        };
    }

    fn sloped(&self) -> Option<Fit> {
        let units = || self.samples.iter().map(|(units, _)| *units);
        let (least, most) = (
            units().fold(f64::INFINITY, f64::min),
            units().fold(0.0, f64::max),
        );
        if self.samples.len() < ENOUGH || most < least * SPAN {
            return None;
        }
        let apart = (most - least) / 10.0;
        let mut slopes = Vec::new();
        for (at, (units, seconds)) in self.samples.iter().enumerate() {
            for (other_units, other_seconds) in self.samples.iter().skip(at + 1) {
                let run = other_units - units;
                if run.abs() >= apart {
                    slopes.push((other_seconds - seconds) / run);
                }
            }
        }
        let per_unit = median(&mut slopes)?;
        let mut rests: Vec<f64> = self
            .samples
            .iter()
            .map(|(units, seconds)| seconds - units * per_unit)
            .collect();
        let fixed = median(&mut rests)?;
        (per_unit > 0.0 && fixed >= 0.0).then_some(Fit { fixed, per_unit })
    }

    /// Keeps the seeded fixed part, unless a measurement took less than it.
    fn proportional(&self) -> Option<Fit> {
        let quickest = self.samples.iter().map(|(_, seconds)| *seconds);
        let quickest = quickest.fold(f64::INFINITY, f64::min);
        let seeded = self.seed.map_or(0.0, |seed| seed.fixed);
        let fixed = if seeded < quickest { seeded } else { 0.0 };
        let mut ratios: Vec<f64> = self
            .samples
            .iter()
            .map(|(units, seconds)| (seconds - fixed) / units)
            .collect();
        let per_unit = median(&mut ratios)?;
        Some(Fit { fixed, per_unit })
    }
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
    fn a_seed_counts_until_three_measurements_and_keeps_its_fixed_part() {
        let mut line = Line::default();
        let seed = Fit {
            fixed: 0.5,
            per_unit: 0.001,
        };
        line.seed(seed);
        line.observe(1_000.0, 2.5);
        line.observe(1_000.0, 2.5);
        assert_eq!(line.fit(), Some(seed));
        line.observe(1_000.0, 2.5);
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
