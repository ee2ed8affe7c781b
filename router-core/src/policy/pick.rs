//! Chooses among costs: cheapest first, ties by free capacity and then by chance, or sampled.

use fastrand::Rng;

/// One candidate as the choice sees it.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Its cost; lower is better.
    pub cost: f64,
    /// How full its KV cache is, as a share of its capacity or as a plain block count; lower is better among equals.
    pub fullness: f64,
}

/// Costs nearer than this count as equal: sums of a few thousand blocks in different order differ by less.
const TIE: f64 = 1e-6;

/// Returns the index of the chosen candidate, `None` when there are none.
///
/// At `temperature` 0 the cheapest is taken; equals go to the one with the emptiest cache, then uniformly by `rng`.
/// Above 0 candidates are drawn with weight `exp(−(cost − min) ÷ (temperature × spread))`, where spread is the difference
/// between dearest and cheapest, so that the scale of costs does not matter.
#[must_use]
pub fn pick(choices: &[Choice], temperature: f64, rng: &mut Rng) -> Option<usize> {
    let cheapest = choices
        .iter()
        .map(|choice| choice.cost)
        .min_by(f64::total_cmp)?;
    if temperature > 0.0 {
        return Some(sample(choices, cheapest, temperature, rng));
    }
    let equal = |choice: &Choice| choice.cost - cheapest <= TIE;
    let emptiest = choices
        .iter()
        .filter(|choice| equal(choice))
        .map(|choice| choice.fullness)
        .min_by(f64::total_cmp)?;
    // Reservoir of one: uniform among the equals in a single pass without a list of them.
    let mut chosen = None;
    let mut equals = 0usize;
    for (index, choice) in choices.iter().enumerate() {
        if equal(choice) && choice.fullness - emptiest <= TIE {
            equals += 1;
            if rng.usize(0..equals) == 0 {
                chosen = Some(index);
            }
        }
    }
    chosen
}

fn sample(choices: &[Choice], cheapest: f64, temperature: f64, rng: &mut Rng) -> usize {
    let dearest = choices
        .iter()
        .map(|choice| choice.cost)
        .fold(cheapest, f64::max);
    let scale = temperature * (dearest - cheapest).max(TIE);
    let weights: Vec<f64> = choices
        .iter()
        .map(|choice| (-(choice.cost - cheapest) / scale).exp())
        .collect();
    let mut left = rng.f64() * weights.iter().sum::<f64>();
    for (index, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return index;
        }
    }
    choices.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(costs: &[(f64, f64)]) -> Vec<Choice> {
        costs
            .iter()
            .map(|&(cost, fullness)| Choice { cost, fullness })
            .collect()
    }

    #[test]
    fn the_cheapest_wins_whatever_its_cache_holds() {
        let mut rng = Rng::with_seed(1);
        let all = choices(&[(5.0, 0.0), (4.0, 0.9), (6.0, 0.0)]);
        assert_eq!(pick(&all, 0.0, &mut rng), Some(1));
        assert_eq!(pick(&[], 0.0, &mut rng), None);
    }

    #[test]
    fn equals_go_to_the_emptiest() {
        let mut rng = Rng::with_seed(1);
        let all = choices(&[(4.0, 0.5), (4.0, 0.1), (4.0, 0.2)]);
        assert!((0..50).all(|_| pick(&all, 0.0, &mut rng) == Some(1)));
    }

    #[test]
    fn full_equals_are_spread_evenly_in_any_order() {
        for seed in 0..4 {
            let mut rng = Rng::with_seed(seed);
            let all = choices(&[(4.0, 0.5); 4]);
            let mut wins = [0u32; 4];
            for _ in 0..400 {
                wins[pick(&all, 0.0, &mut rng).unwrap()] += 1;
            }
            // 100 expected each; 60 and 140 are more than four standard deviations (8.7) away.
            assert!(
                wins.iter().all(|&won| (60..=140).contains(&won)),
                "{wins:?}"
            );
        }
    }

    #[test]
    fn temperature_spreads_in_proportion() {
        let mut rng = Rng::with_seed(7);
        let all = choices(&[(10.0, 0.0), (20.0, 0.0)]);
        let mut first = 0;
        for _ in 0..1_000 {
            first += u32::from(pick(&all, 1.0, &mut rng) == Some(0));
        }
        // Weights 1 and e⁻¹: 731 expected, standard deviation 14.
        assert!((670..=790).contains(&first), "{first}");
    }

    #[test]
    fn the_same_seed_chooses_alike() {
        let all = choices(&[(4.0, 0.5); 4]);
        let run = || {
            let mut rng = Rng::with_seed(42);
            (0..20)
                .map(|_| pick(&all, 0.0, &mut rng))
                .collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
    }
}
