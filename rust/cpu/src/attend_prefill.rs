//! Paged attention of rows at arbitrary positions.

use kvweave_core::ops::{AttendPrefill, Element, OpError};
use rayon::prelude::*;

use crate::disjoint::Disjoint;
use crate::grain::{least_tasks, work};
use crate::piece::Pieces;
use crate::row_chunk::{Call, RowChunk, finish};
use crate::tile::Tile;
use crate::turn::Turns;

/// Rows × query heads of a KV head that share the loading of a tile: enough that loading costs a
/// few percent, few enough that q and out stay in a core's L2.
const CHUNK: usize = 384;

/// Fewest rows × heads of a chunk, however many threads wait.
const SMALLEST_CHUNK: usize = 48;

/// Chunks wanted per thread, so that unequal ones even out.
const CHUNKS_PER_THREAD: usize = 8;

/// See [`AttendPrefill`]. Fastest where rows come in rising position order.
///
/// # Errors
/// What [`AttendPrefill::validate`] refuses.
pub fn attend_prefill<T: Element, C: Element>(
    params: AttendPrefill<'_, T, C>,
) -> Result<(), OpError> {
    params.validate()?;
    let AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse } = params;
    let needed = kv.entries.iter().map(|row| (kv.layer, row[4]));
    let turns = Turns::new(scoring.rope, needed);
    let call = Call { queries, kv, scoring, turns: &turns };
    let pieces = Pieces::new(&kv, &scoring, entry_offsets);
    let orders: Vec<Vec<u32>> = row_offsets
        .windows(2)
        .map(|rows| sorted_rows(queries.positions, rows[0] as u32..rows[1] as u32))
        .collect();
    let chunk_rows = chunk_rows(&call);
    let mut tasks = Vec::new();
    for (request, rows) in orders.iter().enumerate() {
        for rows in rows.chunks(chunk_rows) {
            tasks.extend((0..kv.geometry.kv_heads).map(|head| (request, head, rows)));
        }
    }
    let (out, lse) = (Disjoint::new(out), Disjoint::new(lse));
    let (group, dim) = (call.group(), kv.geometry.head_dim);
    let attended = tasks.iter().map(|&(request, kv_head, rows)| {
        work(pieces.of(request, kv_head).len(), rows.len() * group, dim)
    });
    let least = least_tasks(tasks.len(), attended.sum());
    tasks.par_iter().with_max_len(1).with_min_len(least).for_each_init(
        || Tile::new(dim),
        |tile, &(request, kv_head, rows)| {
            let mut chunk = RowChunk::new(&call, rows, kv_head);
            chunk.attend(&call, kv_head, pieces.of(request, kv_head), tile, true);
            store(&call, rows, kv_head, &chunk, &out, &lse);
        },
    );
    Ok(())
}

fn store<T: Element, C>(
    call: &Call<'_, T, C>,
    rows: &[u32],
    kv_head: usize,
    chunk: &RowChunk,
    out: &Disjoint<'_, T>,
    lse: &Disjoint<'_, f32>,
) {
    let (group, dim) = (call.group(), call.kv.geometry.head_dim);
    let mut sums = vec![0.0; dim];
    for packed in 0..rows.len() * group {
        let row = rows[packed / group] as usize;
        let state = row * call.queries.vectors.heads + kv_head * group + packed % group;
        let (top, mass, undivided) = chunk.partial(packed);
        sums.copy_from_slice(undivided);
        // SAFETY: a row is in one chunk per KV head and a query head belongs to one KV head, so
        // no other task holds this state.
        let (out, lse) = unsafe { (out.piece(state * dim, dim), lse.piece(state, 1)) };
        lse[0] = finish((top, mass), call.kv.scales.value, &mut sums, out);
    }
}

/// The rows of a request by rising position: rows of a block then see about the same keys.
fn sorted_rows(positions: &[i32], rows: std::ops::Range<u32>) -> Vec<u32> {
    let mut order: Vec<u32> = rows.collect();
    if !order.is_sorted_by_key(|&row| positions[row as usize]) {
        order.sort_by_key(|&row| positions[row as usize]);
    }
    order
}

fn chunk_rows<T, C>(call: &Call<'_, T, C>) -> usize {
    let rows = call.queries.vectors.rows;
    let wanted = CHUNKS_PER_THREAD * rayon::current_num_threads();
    let heads = call.kv.geometry.kv_heads;
    let fair = (rows * heads * call.group()) / wanted;
    fair.clamp(SMALLEST_CHUNK, CHUNK).div_ceil(call.group())
}
