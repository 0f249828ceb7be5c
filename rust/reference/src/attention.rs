//! One row of paged attention: the definition that prefill, decode and scoring share.

use kvweave_core::ops::{Element, Entry, KvView, Scoring, Visible};

use crate::rotate::rotate;

/// A key that a row sees.
pub(crate) struct SeenKey {
    pub(crate) position: usize,
    /// Scaled and capped score.
    pub(crate) score: f64,
    /// First element of the value vector.
    pub(crate) value: usize,
}

/// The keys of `entries` at positions that are `seen`, in order, with their scores.
pub(crate) fn visible_keys<T: Element, C: Element>(
    q: &[T],
    seen: &Visible,
    kv: &KvView<'_, C>,
    entries: &[[i32; 5]],
    kv_head: usize,
    scoring: &Scoring<'_>,
) -> Vec<SeenKey> {
    let dim = kv.geometry.head_dim;
    let mut keys = Vec::new();
    for &row in entries {
        let entry = Entry::new(row);
        let mut q: Vec<f64> = q.iter().map(|x| x.to_f64()).collect();
        if entry.delta != 0 {
            rotate(&mut q, scoring.rope, kv.layer, -i64::from(entry.delta));
        }
        for slot in entry.begin..entry.end {
            let position = entry.position + (slot - entry.begin) as i64;
            if !seen.contains(position) {
                continue;
            }
            let start = kv.key_offset(entry.block, kv_head, slot);
            let key = &kv.cache[start..start + dim];
            let dot: f64 = q.iter().zip(key).map(|(a, b)| a * b.to_f64()).sum();
            let dot = f64::from(kv.scales.key) * dot;
            let value = kv.value_offset(entry.block, kv_head, slot);
            let position = usize::try_from(position).unwrap_or(usize::MAX);
            keys.push(SeenKey { position, score: capped(dot, scoring), value });
        }
    }
    keys
}

fn capped(dot: f64, scoring: &Scoring<'_>) -> f64 {
    let score = f64::from(scoring.scale) * dot;
    scoring.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
}

/// ln Σ exp(score), and NaN when a score is; −∞ for no keys or no mass.
pub(crate) fn log_sum_exp(keys: &[SeenKey]) -> f64 {
    let top = keys.iter().map(|key| key.score).fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY && !keys.iter().any(|key| key.score.is_nan()) {
        return f64::NEG_INFINITY;
    }
    top + keys.iter().map(|key| (key.score - top).exp()).sum::<f64>().ln()
}

/// Writes the row's output [D] and returns its log-sum-exp.
pub(crate) fn attend_row<T: Element, C: Element>(
    keys: &[SeenKey],
    kv: &KvView<'_, C>,
    out: &mut [T],
) -> f32 {
    let lse = log_sum_exp(keys);
    let mut sum = vec![0.0f64; out.len()];
    for key in keys {
        let weight = if lse == f64::NEG_INFINITY { 0.0 } else { (key.score - lse).exp() };
        let value = &kv.cache[key.value..key.value + out.len()];
        for (sum, v) in sum.iter_mut().zip(value) {
            *sum += weight * v.to_f64();
        }
    }
    for (out, sum) in out.iter_mut().zip(sum) {
        *out = T::from_f64(f64::from(kv.scales.value) * sum);
    }
    f32::from_f64(lse)
}
