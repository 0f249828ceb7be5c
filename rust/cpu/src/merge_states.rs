//! Partial attentions combined by log-sum-exp.

use kvweave_core::ops::{Element, MergeStates, OpError};
use rayon::prelude::*;

/// States of one task.
const CHUNK: usize = 64;

/// See [`MergeStates`].
///
/// # Errors
/// What [`MergeStates::validate`] refuses.
pub fn merge_states<T: Element>(params: MergeStates<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let MergeStates { outs, lses, splits, states, head_dim, out, lse } = params;
    let merge = |(chunk, (out, lse)): (usize, (&mut [T], &mut [f32]))| {
        let mut part = vec![0.0; head_dim];
        let mut sums = vec![0.0; head_dim];
        for (i, (out, lse)) in out.chunks_exact_mut(head_dim).zip(lse).enumerate() {
            let state = chunk * CHUNK + i;
            let parts = (0..splits).map(|split| split * states + state);
            let seen = parts.filter(|&part| lses[part] != f32::NEG_INFINITY);
            let top = seen.clone().map(|part| lses[part]).fold(f32::NEG_INFINITY, f32::max);
            let mut total = 0.0;
            sums.fill(0.0);
            for index in seen {
                let weight = (lses[index] - top).exp();
                total += weight;
                T::widen(&outs[index * head_dim..(index + 1) * head_dim], &mut part);
                sums.iter_mut().zip(&part).for_each(|(sum, x)| *sum += weight * x);
            }
            *lse = top + total.ln();
            let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
            sums.iter_mut().for_each(|sum| *sum *= factor);
            T::narrow(&sums, out);
        }
    };
    out.par_chunks_mut(CHUNK * head_dim).zip(lse.par_chunks_mut(CHUNK)).enumerate().for_each(merge);
    Ok(())
}
