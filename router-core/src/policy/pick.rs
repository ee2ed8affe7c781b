//! Chooses among costs: cheapest first, ties by free capacity and then by chance, or sampled.

use fastrand::Rng;

/// How full the KV cache of a candidate is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fullness {
    /// Blocks that it holds as far as known.
    pub(crate) blocks: usize,
    /// Blocks that it can hold, when known.
    pub(crate) capacity_blocks: Option<usize>,
}

/// Costs nearer than this count as equal: sums of a few thousand blocks in different order differ by less.
const TIE: f64 = 1e-6;

/// Returns the lowest cost, infinity without a candidate.
pub(crate) fn cheapest(costs: &[f64]) -> f64 {
    // Lanes of their own, so that one comparison does not wait for the one before.
    let least = |a: f64, b: f64| if b < a { b } else { a };
    let (lines, rest) = costs.as_chunks::<8>();
    let mut lanes = [f64::INFINITY; 8];
    for line in lines {
        for (lane, cost) in lanes.iter_mut().zip(line) {
            *lane = least(*lane, *cost);
        }
    }
    lanes.iter().chain(rest).copied().fold(f64::INFINITY, least)
}

/// Returns the position of the chosen candidate; positions of infinite cost are none, and at least one is finite.
///
/// At `temperature` 0 one of the `cheapest` is taken: that with the emptiest cache, then uniformly by `rng`. Emptiness is the
/// share of its capacity, or the plain number of blocks where one of the equals does not know its capacity; `fullness` is
/// asked for equals alone. Above 0 candidates are drawn with weight `exp(−(cost − min) ÷ (temperature × spread))`, where spread
/// is the difference between dearest and cheapest, so that the scale of costs does not matter. `equals` is room to work in.
pub(crate) fn pick(
    costs: &[f64],
    cheapest: f64,
    fullness: impl Fn(usize) -> Fullness,
    temperature: f64,
    equals: &mut Vec<(usize, Fullness)>,
    rng: &mut Rng,
) -> usize {
    if temperature > 0.0 {
        return sample(costs, cheapest, temperature, rng);
    }
    equals.clear();
    let (lines, rest) = costs.as_chunks::<8>();
    let is_equal = |cost: &f64| *cost - cheapest <= TIE;
    for (line, costs) in lines.iter().enumerate() {
        // Hardly any line has one: this compiles to vector comparisons.
        if costs.iter().fold(false, |any, cost| any | is_equal(cost)) {
            let equal = (8 * line..).zip(costs).filter(|(_, cost)| is_equal(cost));
            equals.extend(equal.map(|(at, _)| (at, UNKNOWN)));
        }
    }
    let equal = (8 * lines.len()..)
        .zip(rest)
        .filter(|(_, cost)| is_equal(cost));
    equals.extend(equal.map(|(at, _)| (at, UNKNOWN)));
    if let [(only, _)] = equals[..] {
        return only;
    }
    for (at, known) in equals.iter_mut() {
        *known = fullness(*at);
    }
    emptiest(equals, rng)
}

/// Before it is asked for.
const UNKNOWN: Fullness = Fullness {
    blocks: 0,
    capacity_blocks: None,
};

/// Chooses among equals, of which there is at least one.
fn emptiest(equals: &[(usize, Fullness)], rng: &mut Rng) -> usize {
    let comparable = equals
        .iter()
        .all(|(_, fullness)| fullness.capacity_blocks.is_some());
    let share = |fullness: &Fullness| match fullness.capacity_blocks {
        Some(capacity) if comparable => fullness.blocks as f64 / capacity.max(1) as f64,
        _ => fullness.blocks as f64,
    };
    let least = equals
        .iter()
        .map(|(_, fullness)| share(fullness))
        .fold(f64::INFINITY, f64::min);
    // Reservoir of one: uniform among the emptiest in a single pass without a list of them.
    let mut chosen = equals[0].0;
    let mut emptiest = 0usize;
    for (at, fullness) in equals {
        if share(fullness) - least <= TIE {
            emptiest += 1;
            if rng.usize(0..emptiest) == 0 {
                chosen = *at;
            }
        }
    }
    chosen
}

fn sample(costs: &[f64], cheapest: f64, temperature: f64, rng: &mut Rng) -> usize {
    let finite = || {
        costs
            .iter()
            .copied()
            .enumerate()
            .filter(|(_, cost)| cost.is_finite())
    };
    let dearest = finite().map(|(_, cost)| cost).fold(cheapest, f64::max);
    let scale = temperature * (dearest - cheapest).max(TIE);
    let weights = || finite().map(|(at, cost)| (at, (-(cost - cheapest) / scale).exp()));
    let mut left = rng.f64() * weights().map(|(_, weight)| weight).sum::<f64>();
    let mut last = 0;
    for (at, weight) in weights() {
        left -= weight;
        last = at;
        if left < 0.0 {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(candidates: &[(f64, Fullness)], temperature: f64, rng: &mut Rng) -> Option<usize> {
        let costs: Vec<f64> = candidates.iter().map(|(cost, _)| *cost).collect();
        let least = cheapest(&costs);
        let fullness = |at: usize| candidates[at].1;
        let mut equals = Vec::new();
        least
            .is_finite()
            .then(|| pick(&costs, least, fullness, temperature, &mut equals, rng))
    }

    /// A cache of 100 blocks.
    fn holds(blocks: usize) -> Fullness {
        Fullness {
            blocks,
            capacity_blocks: Some(100),
        }
    }

    #[test]
    fn the_cheapest_wins_whatever_its_cache_holds() {
        let mut rng = Rng::with_seed(1);
        let all = [(5.0, holds(0)), (4.0, holds(90)), (6.0, holds(0))];
        assert_eq!(choose(&all, 0.0, &mut rng), Some(1));
        assert_eq!(choose(&[], 0.0, &mut rng), None);
    }

    #[test]
    fn who_is_no_candidate_is_never_chosen() {
        let mut rng = Rng::with_seed(1);
        let none = (f64::INFINITY, holds(0));
        assert_eq!(choose(&[none, none], 0.0, &mut rng), None);
        let all = [none, (4.0, holds(90)), none, (5.0, holds(90)), none];
        assert_eq!(choose(&all, 0.0, &mut rng), Some(1));
        for _ in 0..200 {
            let chosen = choose(&all, 5.0, &mut rng).unwrap();
            assert!(chosen == 1 || chosen == 3, "{chosen}");
        }
    }

    #[test]
    fn the_lowest_cost_is_found_at_every_place() {
        for length in 1..40 {
            for place in 0..length {
                let mut costs = vec![7.0; length];
                costs[place] = 3.0;
                assert_eq!(cheapest(&costs).to_bits(), 3.0_f64.to_bits());
            }
        }
    }

    #[test]
    fn equals_go_to_the_emptiest() {
        let mut rng = Rng::with_seed(1);
        let all = [(4.0, holds(50)), (4.0, holds(10)), (4.0, holds(20))];
        assert!((0..50).all(|_| choose(&all, 0.0, &mut rng) == Some(1)));
    }

    #[test]
    fn shares_are_compared_only_where_all_are_known() {
        let mut rng = Rng::with_seed(1);
        let small = Fullness {
            blocks: 20,
            capacity_blocks: Some(40),
        };
        let all = [(4.0, holds(30)), (4.0, small)];
        assert_eq!(choose(&all, 0.0, &mut rng), Some(0)); // 0.3 of 100 against 0.5 of 40
        let unknown = Fullness {
            blocks: 60,
            capacity_blocks: None,
        };
        let all = [(4.0, holds(30)), (4.0, small), (4.0, unknown)];
        assert_eq!(choose(&all, 0.0, &mut rng), Some(1)); // 20 blocks are the fewest
    }

    #[test]
    fn full_equals_are_spread_evenly_in_any_order() {
        for seed in 0..4 {
            let mut rng = Rng::with_seed(seed);
            let all = [(4.0, holds(50)); 4];
            let mut wins = [0u32; 4];
            for _ in 0..400 {
                wins[choose(&all, 0.0, &mut rng).unwrap()] += 1;
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
        let all = [(10.0, holds(0)), (20.0, holds(0))];
        let mut first = 0;
        for _ in 0..1_000 {
            first += u32::from(choose(&all, 1.0, &mut rng) == Some(0));
        }
        // Weights 1 and e⁻¹: 731 expected, standard deviation 14.
        assert!((670..=790).contains(&first), "{first}");
    }

    #[test]
    fn the_same_seed_chooses_alike() {
        let all = [(4.0, holds(50)); 4];
        let run = || {
            let mut rng = Rng::with_seed(42);
            (0..20)
                .map(|_| choose(&all, 0.0, &mut rng))
                .collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
    }
}
