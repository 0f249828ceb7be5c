//! Attention over chosen pages, with an estimate of the others.

use kvweave_core::ops::{Element, Entry, EstimatePages, OpError};

use crate::rotate::rotate;

/// See [`EstimatePages`].
///
/// # Errors
/// What [`EstimatePages::validate`] refuses.
pub fn estimate_pages<T: Element>(params: EstimatePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let EstimatePages { queries, attended, attended_lse, kv, scoring, .. } = params;
    let EstimatePages { entry_offsets, read, means, out, lse, .. } = params;
    let (heads, dim) = (queries.vectors.heads, kv.geometry.head_dim);
    let group = heads / kv.geometry.kv_heads;
    for state in 0..lse.len() {
        let (request, head) = (state / heads, state % heads);
        let reach = kv.head(head / group, &scoring);
        let known = read.of(request, head / group);
        let left: Vec<Entry> = kv.entries[kv.span(entry_offsets, request, reach.table)]
            .iter()
            .filter(|row| known.iter().all(|other| other[3] != row[3]))
            .map(|&row| Entry::new(row))
            .collect();
        let (from, to) = (&attended[state * dim..][..dim], &mut out[state * dim..][..dim]);
        let mut terms: Vec<(f64, Vec<f64>)> = Vec::new();
        for entry in left {
            let mean = &means[(entry.block + reach.rank) * 2 * dim..][..2 * dim];
            let (key, value) = mean.split_at(dim);
            if !key.iter().all(|x| x.is_finite()) {
                continue;
            }
            let q = queries.vectors.vector(request, head);
            let mut q: Vec<f64> = q.iter().map(|x| x.to_f64()).collect();
            rotate(&mut q, scoring.rope, kv.layer, -i64::from(entry.delta));
            let dot: f64 = q.iter().zip(key).map(|(q, &k)| q * f64::from(k)).sum();
            let logit = dot * f64::from(scoring.scale);
            let capped = |cap: f32| f64::from(cap) * (logit / f64::from(cap)).tanh();
            let logit = scoring.softcap.map_or(logit, capped) + (entry.tokens() as f64).ln();
            terms.push((logit, value.iter().map(|&x| f64::from(x)).collect()));
        }
        if terms.is_empty() {
            to.copy_from_slice(from);
            lse[state] = attended_lse[state];
            continue;
        }
        let exact = f64::from(attended_lse[state]);
        if exact != f64::NEG_INFINITY {
            terms.push((exact, from.iter().map(|x| x.to_f64()).collect()));
        }
        let top = terms.iter().map(|term| term.0).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = terms.iter().map(|term| (term.0 - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (d, to) in to.iter_mut().enumerate() {
            let parts = terms.iter().zip(&weights).map(|(term, weight)| weight * term.1[d]);
            *to = T::from_f64(parts.sum::<f64>() / total);
        }
        lse[state] = f32::from_f64(top + total.ln());
    }
    Ok(())
}
