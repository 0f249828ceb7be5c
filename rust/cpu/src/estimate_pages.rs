//! Attention over chosen pages, with an estimate of the others.

use kvweave_core::ops::{Element, Entry, EstimatePages, OpError};
use rayon::prelude::*;

use crate::grain::least_tasks;
use crate::turn::{Turn, Turns};

/// Sums that go on side by side, so that additions need not wait for each other.
const LANES: usize = 16;

/// See [`EstimatePages`].
///
/// # Errors
/// What [`EstimatePages::validate`] refuses.
pub fn estimate_pages<T: Element>(params: EstimatePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let EstimatePages { queries, attended, attended_lse, kv, scoring, .. } = params;
    let EstimatePages { entry_offsets, read, means, out, lse, .. } = params;
    if lse.is_empty() {
        return Ok(());
    }
    let (kv_heads, dim) = (kv.geometry.kv_heads, kv.geometry.head_dim);
    let group = queries.vectors.heads / kv_heads;
    let left: Vec<(usize, Vec<Entry>)> = (0..lse.len() / group)
        .map(|at| {
            let reach = kv.head(at % kv_heads, &scoring);
            let listed = &kv.entries[kv.span(entry_offsets, at / kv_heads, reach.table)];
            (reach.rank, left_out(listed, read.of(at / kv_heads, at % kv_heads)))
        })
        .collect();
    let deltas = left.iter().flat_map(|(_, left)| left).map(|entry| (kv.layer, entry.delta));
    let turns = Turns::new(scoring.rope, deltas);
    let estimate = |sums: &mut Sums, (at, (out, lse)): (usize, (&mut [T], &mut [f32]))| {
        let (rank, left) = &left[at];
        let first = at / kv_heads * queries.vectors.heads + at % kv_heads * group;
        for (i, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
            let from = &attended[(first + i) * dim..][..dim];
            let exact = attended_lse[first + i];
            let q = queries.vectors.vector(at / kv_heads, at % kv_heads * group + i);
            let mean_of = |entry: &Entry| &means[(entry.block + rank) * 2 * dim..][..2 * dim];
            let turn_of = |delta| turns.get(scoring.rope, kv.layer, delta);
            sums.score(q, left, mean_of, turn_of, |dot| {
                let logit = dot * scoring.scale;
                scoring.softcap.map_or(logit, |cap| cap * (logit / cap).tanh())
            });
            if sums.logits.iter().all(|&logit| logit == f32::NEG_INFINITY) {
                out.copy_from_slice(from);
                *lse = exact;
            } else {
                *lse = sums.finish(left, mean_of, (from, exact), out);
            }
        }
    };
    let work = left.iter().map(|(_, left)| left.len() * group * dim / LANES).sum();
    let rows = out.par_chunks_exact_mut(group * dim).zip(lse.par_chunks_exact_mut(group));
    let tasks = rows.with_min_len(least_tasks(left.len(), work));
    tasks.enumerate().for_each_init(Sums::default, estimate);
    Ok(())
}

/// The listed entries at whose position none was read.
fn left_out(listed: &[[i32; 5]], read: &[[i32; 5]]) -> Vec<Entry> {
    if listed.is_empty() {
        return Vec::new();
    }
    let mut known: Vec<i32> = read.iter().map(|row| row[3]).collect();
    known.sort_unstable();
    let others = listed.iter().filter(|row| known.binary_search(&row[3]).is_err());
    others.map(|&row| Entry::new(row)).collect()
}

/// What one row adds up, in memory that the next one has too.
#[derive(Default)]
struct Sums {
    q: Vec<f32>,
    logits: Vec<f32>,
    values: Vec<f32>,
    term: Vec<f32>,
}

impl Sums {
    /// The logit of each entry that was left out, −∞ for one that has no term.
    fn score<'a, T: Element>(
        &mut self,
        query: &[T],
        left: &[Entry],
        mean_of: impl Fn(&Entry) -> &'a [f32],
        turn_of: impl Fn(i32) -> Turn<'a>,
        finish: impl Fn(f32) -> f32,
    ) {
        self.q.resize(query.len(), 0.0);
        self.logits.clear();
        let mut turned = None;
        for entry in left {
            if turned != Some(entry.delta) {
                T::widen(query, &mut self.q);
                if entry.delta != 0 {
                    turn_of(entry.delta).undo(&mut self.q);
                }
                turned = Some(entry.delta);
            }
            let key = &mean_of(entry)[..query.len()];
            let logit = if key.iter().all(|x| x.is_finite()) {
                finish(dot(&self.q, key)) + (entry.tokens() as f32).ln()
            } else {
                f32::NEG_INFINITY
            };
            self.logits.push(logit);
        }
    }

    /// Adds all terms up into `out`, and says their log-sum-exp.
    fn finish<'a, T: Element>(
        &mut self,
        left: &[Entry],
        mean_of: impl Fn(&Entry) -> &'a [f32],
        (from, exact): (&[T], f32),
        out: &mut [T],
    ) -> f32 {
        let top = self.logits.iter().copied().fold(exact, f32::max);
        self.values.clear();
        self.values.resize(out.len(), 0.0);
        let mut total = 0.0f64;
        if exact != f32::NEG_INFINITY {
            let weight = (exact - top).exp();
            total += f64::from(weight);
            self.term.resize(out.len(), 0.0);
            T::widen(from, &mut self.term);
            add(&mut self.values, &self.term, weight);
        }
        for (entry, &logit) in left.iter().zip(&self.logits) {
            if logit != f32::NEG_INFINITY {
                let weight = (logit - top).exp();
                total += f64::from(weight);
                add(&mut self.values, &mean_of(entry)[out.len()..], weight);
            }
        }
        self.values.iter_mut().for_each(|sum| *sum = (f64::from(*sum) / total) as f32);
        T::narrow(&self.values, out);
        (f64::from(top) + total.ln()) as f32
    }
}

/// Adds `weight` times a vector.
fn add(sums: &mut [f32], vector: &[f32], weight: f32) {
    sums.iter_mut().zip(vector).for_each(|(sum, x)| *sum += weight * x);
}

fn dot(q: &[f32], key: &[f32]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (q_lanes, q_rest) = q.as_chunks::<LANES>();
    let (key_lanes, key_rest) = key.as_chunks::<LANES>();
    for (q, key) in q_lanes.iter().zip(key_lanes) {
        for lane in 0..LANES {
            sums[lane] += q[lane] * key[lane];
        }
    }
    let rest = q_rest.iter().zip(key_rest).map(|(q, key)| q * key);
    sums.into_iter().chain(rest).sum()
}
