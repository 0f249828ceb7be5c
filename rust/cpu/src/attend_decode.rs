//! Paged attention of one row per request, the keys split over threads.

use kvweave_core::ops::{AttendDecode, Element, KvView, OpError, Queries, Scoring};
use rayon::prelude::*;

use crate::grain::{least_tasks, work};
use crate::piece::{Piece, Pieces, within};
use crate::row_chunk::{Call, RowChunk, finish};
use crate::tile::Tile;
use crate::turn::Turns;

/// Pieces of a split: a constant, so that the bits do not depend on the number of threads.
const SPLIT: usize = 4;

/// Elements of partials that are merged in the time of a unit of work.
const MERGED_A_UNIT: usize = 16;

/// Undivided attention of the query heads of one KV head over one split.
struct Partial {
    /// [H/G] (top, mass), base 2.
    states: Vec<(f32, f32)>,
    /// [H/G, D]
    out: Vec<f32>,
}

/// See [`AttendDecode`].
///
/// # Errors
/// What [`AttendDecode::validate`] refuses.
pub fn attend_decode<T: Element, C: Element>(
    params: AttendDecode<'_, T, C>,
) -> Result<(), OpError> {
    params.validate()?;
    let AttendDecode { queries, kv, scoring, entry_offsets, out, lse } = params;
    attend_rows((queries, kv, scoring), entry_offsets, (out, lse), |tile, kv_head, piece| {
        tile.load_keys(&kv, kv_head, piece);
        tile.load_values(&kv, kv_head, piece);
    });
    Ok(())
}

/// Attends with one row a request to the pieces that `load` brings into a tile.
pub(crate) fn attend_rows<T: Element, C: Copy + Sync>(
    (queries, kv, scoring): (Queries<'_, T>, KvView<'_, C>, Scoring<'_>),
    entry_offsets: &[i32],
    (out, lse): (&mut [T], &mut [f32]),
    load: impl Fn(&mut Tile, usize, &Piece) + Sync,
) {
    let pieces = Pieces::new(&kv, &scoring, entry_offsets);
    let turns = Turns::new(scoring.rope, pieces.deltas().map(|delta| (kv.layer, delta)));
    let call = Call { queries, kv, scoring, turns: &turns };
    let mut tasks = Vec::new();
    let mut ends = Vec::new();
    for (row, &position) in queries.positions.iter().enumerate() {
        for kv_head in 0..kv.geometry.kv_heads {
            let seen = kv.head(kv_head, &scoring).visible(position);
            for part in within(pieces.of(row, kv_head), seen) {
                tasks.extend(part.chunks(SPLIT).map(|split| (row as u32, kv_head, split)));
            }
            ends.push(tasks.len());
        }
    }
    let (group, dim) = (call.group(), kv.geometry.head_dim);
    let attended = tasks.iter().map(|(.., split)| work(split.len(), group, dim)).sum();
    let partials: Vec<Partial> = tasks
        .par_iter()
        .with_min_len(least_tasks(tasks.len(), attended))
        .map_init(
            || Tile::new(dim),
            |tile, &(row, kv_head, split)| attend_split(&call, row, (kv_head, split), tile, &load),
        )
        .collect();
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let spans: Vec<&[Partial]> =
        starts.zip(&ends).map(|(start, &end)| &partials[start..end]).collect();
    let least = least_tasks(spans.len(), partials.len() * group * dim / MERGED_A_UNIT);
    let states = out.par_chunks_exact_mut(group * dim).zip(lse.par_chunks_exact_mut(group));
    states.zip(spans).with_min_len(least).for_each(|((out, lse), span)| {
        for (head, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
            *lse = merge(span, head, kv.scales.value, out);
        }
    });
}

fn attend_split<T: Element, C>(
    call: &Call<'_, T, C>,
    row: u32,
    (kv_head, split): (usize, &[Piece]),
    tile: &mut Tile,
    load: impl Fn(&mut Tile, usize, &Piece),
) -> Partial {
    let mut chunk = RowChunk::new(call, &[row], kv_head);
    chunk.attend_loaded(call, split, tile, true, |tile, piece| load(tile, kv_head, piece));
    let parts = (0..call.group()).map(|head| chunk.partial(head));
    let states = parts.clone().map(|(top, mass, _)| (top, mass)).collect();
    Partial { states, out: parts.flat_map(|(_, _, out)| out).copied().collect() }
}

/// Sums the splits of one head in their order.
fn merge<T: Element>(span: &[Partial], head: usize, scale: f32, out: &mut [T]) -> f32 {
    let dim = out.len();
    let top = span.iter().map(|part| part.states[head].0).fold(f32::NEG_INFINITY, f32::max);
    let base = if top == f32::NEG_INFINITY { 0.0 } else { top };
    let mut sums = vec![0.0; dim];
    let mut total = 0.0;
    for part in span {
        let (top, mass) = part.states[head];
        let weight = (top - base).exp2();
        total += mass * weight;
        for (sum, x) in sums.iter_mut().zip(&part.out[head * dim..(head + 1) * dim]) {
            *sum += x * weight;
        }
    }
    finish((top, total), scale, &mut sums, out)
}
