//! What a planner needs of a link: bytes per second of one transfer, and what each costs whatever its size.

/// A straight line through transfers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    pub(super) bytes_per_second: f64,
    pub(super) fixed_seconds: f64,
}

/// Smaller transfers say nothing of the throughput: they fit into caches and buffers.
const BULK_BYTES: f64 = (1 << 20) as f64;

/// Fits transfers of (bytes, seconds), by the median of slopes; none without a transfer that took time.
pub(super) fn fit(points: &[(f64, f64)]) -> Option<Fit> {
    let bulk: Vec<_> = points
        .iter()
        .copied()
        .filter(|(bytes, _)| *bytes >= BULK_BYTES)
        .collect();
    let bulk = if bulk.is_empty() { points } else { &bulk[..] };
    let mut slopes = Vec::new();
    for (at, one) in bulk.iter().enumerate() {
        for other in &bulk[at + 1..] {
            if other.0 > one.0 {
                slopes.push((other.1 - one.1) / (other.0 - one.0));
            }
        }
    }
    let slope = median(slopes).filter(|slope| *slope > 0.0).or_else(|| {
        median(
            bulk.iter()
                .map(|(bytes, seconds)| seconds / bytes)
                .collect(),
        )
    })?;
    let rest = points
        .iter()
        .map(|(bytes, seconds)| seconds - bytes * slope);
    let fixed = median(rest.collect()).unwrap_or(0.0);
    (slope > 0.0).then(|| Fit {
        bytes_per_second: 1.0 / slope,
        fixed_seconds: fixed.max(0.0),
    })
}

/// Returns the middle of finite numbers.
pub(super) fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.retain(|number| number.is_finite());
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    let upper = numbers.get(middle).copied()?;
    if numbers.len().is_multiple_of(2) {
        return Some(f64::midpoint(numbers[middle - 1], upper));
    }
    Some(upper)
}
