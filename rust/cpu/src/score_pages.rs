//! Scores of pages by their bounds.

use kvweave_core::ops::{Element, Entry, OpError, PageScore, ScorePages, SharedScore};
use rayon::prelude::*;

use crate::grain::least_tasks;
use crate::turn::Turns;

/// Sums that go on side by side, so that additions need not wait for each other.
const LANES: usize = 16;

/// See [`ScorePages`].
///
/// # Errors
/// What [`ScorePages::validate`] refuses.
pub fn score_pages<T: Element>(params: ScorePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let ScorePages { queries, kv, scoring, entry_offsets, bounds, score, shared, .. } = params;
    let ScorePages { scores, width, counts, .. } = params;
    let (kv_heads, dim) = (kv.geometry.kv_heads, kv.geometry.head_dim);
    let group = queries.vectors.heads / kv_heads;
    let tables: Vec<(usize, &[[i32; 5]])> = (0..counts.len())
        .map(|at| {
            let reach = kv.head(at % kv_heads, &scoring);
            (reach.rank, &kv.entries[kv.span(entry_offsets, at / kv_heads, reach.table)])
        })
        .collect();
    counts.iter_mut().zip(&tables).for_each(|(count, (_, table))| *count = table.len() as i32);
    if width == 0 {
        return Ok(());
    }
    let deltas = tables.iter().flat_map(|(_, table)| table.iter()).map(|row| (kv.layer, row[4]));
    let turns = Turns::new(scoring.rope, deltas);
    let finish = |dot: f32| {
        let logit = dot * scoring.scale;
        scoring.softcap.map_or(logit, |cap| cap * (logit / cap).tanh())
    };
    let of_head = |(q, room): &mut (Vec<f32>, Vec<f32>), (at, places): (usize, &mut [f32])| {
        let (rank, table) = tables[at];
        let mut turned = None;
        for (place, &row) in places.iter_mut().zip(table) {
            let entry = Entry::new(row);
            if turned != Some(entry.delta) {
                q.resize(group * dim, 0.0);
                for (i, q) in q.chunks_exact_mut(dim).enumerate() {
                    let head = at % kv_heads * group + i;
                    T::widen(queries.vectors.vector(at / kv_heads, head), q);
                    if entry.delta != 0 {
                        turns.get(scoring.rope, kv.layer, entry.delta).undo(q);
                    }
                }
                turned = Some(entry.delta);
            }
            let of_page = bounds.of_page(entry.block + rank, (dim, score), room);
            let heads = q.chunks_exact(dim).map(|q| finish(dot_of(q, of_page, score)));
            *place = match shared {
                SharedScore::Sum => heads.sum(),
                SharedScore::Highest => heads.fold(f32::NEG_INFINITY, greater),
            };
        }
    };
    let work = tables.iter().map(|(_, table)| table.len() * group * dim / LANES).sum();
    let heads = scores.par_chunks_exact_mut(width).enumerate();
    heads.with_min_len(least_tasks(tables.len(), work)).for_each_init(Default::default, of_head);
    Ok(())
}

/// Of a query and the bounds that its score is made of.
fn dot_of(q: &[f32], bounds: &[f32], score: PageScore) -> f32 {
    match score {
        PageScore::Mean => summed(q, bounds, bounds, |q, mean, _| q * mean),
        PageScore::MinMax => {
            let (least, greatest) = bounds.split_at(q.len());
            summed(q, least, greatest, |q, a, b| greater(q * a, q * b))
        }
    }
}

/// The sum of what is made of three numbers each.
#[inline(always)]
fn summed(q: &[f32], a: &[f32], b: &[f32], part: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let whole = q.len() / LANES * LANES;
    let chunks = q.as_chunks::<LANES>().0.iter().zip(a.as_chunks::<LANES>().0);
    for ((q, a), b) in chunks.zip(b.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            sums[lane] += part(q[lane], a[lane], b[lane]);
        }
    }
    let rest = (whole..q.len()).map(|d| part(q[d], a[d], b[d]));
    sums.into_iter().chain(rest).sum()
}

/// The greater of two numbers, NaN where one is.
#[inline(always)]
fn greater(one: f32, other: f32) -> f32 {
    if one.is_nan() || one > other { one } else { other }
}
