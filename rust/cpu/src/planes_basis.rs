//! What planes are packed in: directions in the metric that errors count in, and bits of each.

use crate::symmetric_eigen::{Eigen, NoEigenvectors, symmetric_eigen};
use crate::water_filling::{share_out, steps};

/// Of the queries' mean square, what every direction has at least: texts have queries that those
/// which were taken in had not.
const LEAST_QUERY: f64 = 1e-2;

/// Mean and second moments around it of one side of a page.
pub(crate) struct Spread {
    /// [D]
    pub(crate) mean: Vec<f64>,
    /// [D, D]
    pub(crate) around: Vec<f64>,
}

/// The rows [2, 2D + 2, D] of a page: of keys and of values the mean, each channel's bits, its
/// step, and what measures it.
///
/// An error e of a key moves scores by q·e. So with the [`metric`] of queries, keys are
/// decorrelated in it: along eigenvectors of A·S·A, where A is its root and S what keys
/// spread. Then the output moves by the mean of (q·e)² / D times the spread of values, where an
/// error of a value moves it by its own square; so both share one budget of bytes. Without queries
/// the error of either counts as a share of its spread.
pub(crate) fn planes_basis(
    [keys, values]: &[Spread; 2],
    metric: Option<&[f64]>,
    token_bytes: usize,
) -> Result<Vec<f32>, NoEigenvectors> {
    let dim = keys.mean.len();
    let keys_side = match metric {
        Some(metric) => {
            let [root, inverse] = roots(metric, dim)?;
            let weighted = product(&product(&root, &keys.around, dim), &root, dim);
            let found = symmetric_eigen(&weighted, dim)?;
            let measures = product(&found.rows, &root, dim);
            Side { directions: product(&found.rows, &inverse, dim), measures, spread: found.values }
        }
        None => Side::plain(symmetric_eigen(&keys.around, dim)?),
    };
    let values_side = Side::plain(symmetric_eigen(&values.around, dim)?);
    let totals = [&keys_side, &values_side].map(Side::total);
    let factors = match metric {
        Some(_) => [totals[1] / dim as f64, 1.0],
        None => totals.map(|total| if total > 0.0 { 1.0 / total } else { 1.0 }),
    };
    let weigh = |side: &Side, factor: f64| -> Vec<f64> {
        side.spread.iter().map(|spread| spread.max(0.0) * factor).collect()
    };
    let (of_keys, of_values) = (weigh(&keys_side, factors[0]), weigh(&values_side, factors[1]));
    let widths = share_out(&of_keys, &of_values, token_bytes);
    let mut rows = Vec::with_capacity(2 * (2 * dim + 2) * dim);
    for ((side, mean), widths) in
        [(keys_side, &keys.mean), (values_side, &values.mean)].into_iter().zip(widths)
    {
        let channels: Vec<(f32, f64)> = steps(widths)
            .zip(&side.spread)
            .map(|((bits, step), spread)| (bits, step * spread.max(0.0).sqrt()))
            .collect();
        rows.extend(mean.iter().map(|&mean| mean as f32));
        rows.extend(channels.iter().map(|&(bits, _)| bits));
        for (direction, (_, step)) in side.directions.chunks_exact(dim).zip(&channels) {
            rows.extend(direction.iter().map(|x| (x * step) as f32));
        }
        for (measure, (_, step)) in side.measures.chunks_exact(dim).zip(&channels) {
            // A channel in which nothing is spread has no steps to be measured in.
            let inverse = if *step > 0.0 { 1.0 / step } else { 0.0 };
            let inverse = if inverse < f64::from(f32::MAX) { inverse } else { 0.0 };
            rows.extend(measure.iter().map(|x| (x * inverse) as f32));
        }
    }
    Ok(rows)
}

/// Directions of one side, the largest spread first.
struct Side {
    /// [D]: variances along them.
    spread: Vec<f64>,
    /// [D, D]: what 1 along each adds to a vector.
    directions: Vec<f64>,
    /// [D, D]: the product with a vector is how far it lies along each.
    measures: Vec<f64>,
}

impl Side {
    fn plain(found: Eigen) -> Self {
        Self { spread: found.values, directions: found.rows.clone(), measures: found.rows }
    }

    fn total(&self) -> f64 {
        self.spread.iter().map(|spread| spread.max(0.0)).sum()
    }
}

/// What errors of keys count by: the mean of q qᵀ [D, D], and something in every direction.
pub(crate) fn metric(mut queries: Vec<f64>, dim: usize) -> Vec<f64> {
    let size: f64 = (0..dim).map(|i| queries[i * dim + i]).sum::<f64>() / dim as f64;
    // Queries that are all 0 are no metric.
    let least = if size > 0.0 { LEAST_QUERY * size } else { 1.0 };
    for i in 0..dim {
        queries[i * dim + i] += least;
    }
    queries
}

/// The symmetric root of a metric, and the root's inverse.
fn roots(metric: &[f64], dim: usize) -> Result<[Vec<f64>; 2], NoEigenvectors> {
    let Eigen { values, rows } = symmetric_eigen(metric, dim)?;
    let of = |power: fn(f64) -> f64| {
        let mut made = vec![0.0; dim * dim];
        for (value, row) in values.iter().zip(rows.chunks_exact(dim)) {
            let factor = power(value.max(f64::MIN_POSITIVE));
            for (sums, x) in made.chunks_exact_mut(dim).zip(row) {
                for (sum, y) in sums.iter_mut().zip(row) {
                    *sum += factor * x * y;
                }
            }
        }
        made
    };
    Ok([of(f64::sqrt), of(|value| 1.0 / value.sqrt())])
}

/// a · b, all [D, D].
fn product(a: &[f64], b: &[f64], dim: usize) -> Vec<f64> {
    let mut made = vec![0.0; dim * dim];
    for (sums, row) in made.chunks_exact_mut(dim).zip(a.chunks_exact(dim)) {
        for (x, other) in row.iter().zip(b.chunks_exact(dim)) {
            for (sum, y) in sums.iter_mut().zip(other) {
                *sum += x * y;
            }
        }
    }
    made
}
