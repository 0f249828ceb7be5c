//! Attention mass of every key.

use kvweave_core::ops::{Element, OpError, ScoreTokens};

use crate::attention::{log_sum_exp, visible_keys};

/// See [`ScoreTokens`].
///
/// # Errors
/// What [`ScoreTokens::validate`] refuses.
pub fn score_tokens<T: Element, C: Element>(params: ScoreTokens<'_, T, C>) -> Result<(), OpError> {
    params.validate()?;
    let ScoreTokens { queries, kv, scoring, entry_offsets, mass, mut edge } = params;
    let heads = queries.vectors.heads;
    let group = heads / kv.geometry.kv_heads;
    let mut sums = vec![0.0f64; mass.len()];
    for (row, &position) in queries.positions.iter().enumerate() {
        for head in 0..heads {
            let q = queries.vectors.vector(row, head);
            let reach = kv.head(head / group, &scoring);
            let entries = &kv.entries[kv.span(entry_offsets, 0, reach.table)];
            let seen = reach.visible(position);
            let keys = visible_keys(q, &seen, &kv, entries, head / group, &scoring);
            let lse = log_sum_exp(&keys);
            let weigh =
                |score: f64| if lse == f64::NEG_INFINITY { 0.0 } else { (score - lse).exp() };
            for key in &keys {
                sums[key.position] += weigh(key.score);
            }
            if let Some(edge) = &mut edge {
                let near = edge.near(position);
                let far = keys.iter().filter(|key| !near.contains(key.position as i64));
                let share: f64 = far.map(|key| weigh(key.score)).sum();
                edge.share[row * heads + head] = f32::from_f64(share);
            }
        }
    }
    for (mass, sum) in mass.iter_mut().zip(sums) {
        *mass = f32::from_f64(sum);
    }
    Ok(())
}
