//! Attention mass of every key.

use kvweave_core::ops::{Element, OpError, ScoreTokens};

use crate::attention::{log_sum_exp, visible_keys};

/// See [`ScoreTokens`].
///
/// # Errors
/// What [`ScoreTokens::validate`] refuses.
pub fn score_tokens<T: Element>(params: ScoreTokens<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let ScoreTokens { queries, kv, scoring, mass } = params;
    let group = queries.vectors.heads / kv.geometry.kv_heads;
    let mut sums = vec![0.0f64; mass.len()];
    for (row, &position) in queries.positions.iter().enumerate() {
        for head in 0..queries.vectors.heads {
            let q = queries.vectors.vector(row, head);
            let keys = visible_keys(q, position, &kv, kv.entries, head / group, &scoring);
            let lse = log_sum_exp(&keys);
            for key in keys.iter().filter(|_| lse != f64::NEG_INFINITY) {
                sums[key.position] += (key.score - lse).exp();
            }
        }
    }
    for (mass, sum) in mass.iter_mut().zip(sums) {
        *mass = f32::from_f64(sum);
    }
    Ok(())
}
