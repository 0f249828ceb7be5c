//! Partial attentions combined by log-sum-exp.

use kvweave_core::ops::{Element, MergeStates, OpError};

/// See [`MergeStates`].
///
/// # Errors
/// What [`MergeStates::validate`] refuses.
pub fn merge_states<T: Element>(params: MergeStates<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let MergeStates { outs, lses, splits, states, head_dim, out, lse } = params;
    for state in 0..states {
        let parts: Vec<(usize, f64)> = (0..splits)
            .map(|split| split * states + state)
            .map(|part| (part, f64::from(lses[part])))
            .filter(|&(_, lse)| lse != f64::NEG_INFINITY)
            .collect();
        let top = parts.iter().map(|&(_, lse)| lse).fold(f64::NEG_INFINITY, f64::max);
        let total = match parts.is_empty() {
            true => f64::NEG_INFINITY,
            false => top + parts.iter().map(|&(_, lse)| (lse - top).exp()).sum::<f64>().ln(),
        };
        for d in 0..head_dim {
            let weighted = |&(part, lse): &(usize, f64)| {
                (lse - total).exp() * outs[part * head_dim + d].to_f64()
            };
            out[state * head_dim + d] = T::from_f64(parts.iter().map(weighted).sum());
        }
        lse[state] = f32::from_f64(total);
    }
    Ok(())
}
