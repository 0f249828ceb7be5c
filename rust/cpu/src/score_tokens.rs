//! Attention mass of every key, in two passes and without the score matrix.
//!
//! First the log-sum-exp of every (row, head), as in prefill but without values; then, per key
//! tile, the weights again and their sum over rows. Sums run in f32 within a chunk of rows and in
//! f64 over chunks and heads, always in the same order.

use kvweave_core::ops::{Element, OpError, ScoreTokens, Visible};
use rayon::prelude::*;

use crate::grain::{least_tasks, work};
use crate::piece::{KEYS, Piece, Pieces};
use crate::row_block::{AddMass, ROWS};
use crate::row_chunk::{Call, RowChunk};
use crate::simd::dispatch;
use crate::tile::Tile;
use crate::turn::Turns;

/// Rows × query heads of a chunk; a constant, as sums over rows follow the chunks.
const CHUNK: usize = 384;

/// Pieces of one task of the second pass.
const SPAN: usize = 8;

/// What the first pass finds for a chunk of rows of one KV head.
struct Sums {
    /// [blocks · ROWS] log2 Σ 2^score.
    log2: Vec<f32>,
    /// [packed rows] share of the edge; empty where it is not asked for.
    edge: Vec<f32>,
}

/// See [`ScoreTokens`].
///
/// # Errors
/// What [`ScoreTokens::validate`] refuses.
pub fn score_tokens<T: Element, C: Element>(params: ScoreTokens<'_, T, C>) -> Result<(), OpError> {
    params.validate()?;
    let ScoreTokens { queries, kv, scoring, entry_offsets, mass, edge } = params;
    let turns = Turns::new(scoring.rope, kv.entries.iter().map(|row| (kv.layer, row[4])));
    let call = Call { queries, kv, scoring, turns: &turns };
    let pieces = Pieces::new(&kv, &scoring, entry_offsets);
    let mut order: Vec<u32> = (0..queries.vectors.rows as u32).collect();
    order.sort_by_key(|&row| queries.positions[row as usize]);
    let chunks: Vec<&[u32]> = order.chunks(CHUNK.div_ceil(call.group())).collect();
    let heads = kv.geometry.kv_heads;
    let tasks: Vec<(usize, &[u32])> =
        (0..heads).flat_map(|head| chunks.iter().map(move |&rows| (head, rows))).collect();
    let (packed, dim) = (queries.vectors.rows * call.group(), kv.geometry.head_dim);
    let attended = (0..heads).map(|head| work(pieces.of(0, head).len(), packed, dim)).sum();
    let near = edge.as_ref().map(|edge| (edge.window, edge.sink));
    let sums: Vec<Sums> = tasks
        .par_iter()
        .with_max_len(1)
        .with_min_len(least_tasks(tasks.len(), attended))
        .map_init(
            || Tile::new(dim),
            |tile, &(head, rows)| row_sums(&call, rows, head, pieces.of(0, head), near, tile),
        )
        .collect();
    let spans: Vec<(usize, &[Piece])> = (0..heads)
        .flat_map(|head| pieces.of(0, head).chunks(SPAN).map(move |span| (head, span)))
        .collect();
    let masses: Vec<Vec<[f64; KEYS]>> = spans
        .par_iter()
        .with_max_len(1)
        .with_min_len(least_tasks(spans.len(), attended))
        .map(|&(head, span)| {
            let sums = &sums[head * chunks.len()..(head + 1) * chunks.len()];
            span_mass(&call, head, span, &chunks, sums)
        })
        .collect();
    add_up(&spans, &masses, mass);
    if let Some(edge) = edge {
        for (&(head, rows), sums) in tasks.iter().zip(&sums) {
            scatter(&sums.edge, rows, head, call.group(), heads, edge.share);
        }
    }
    Ok(())
}

/// Sums the heads' masses by position.
fn add_up(spans: &[(usize, &[Piece])], masses: &[Vec<[f64; KEYS]>], mass: &mut [f32]) {
    let mut totals = vec![0.0f64; mass.len()];
    for ((_, span), masses) in spans.iter().zip(masses) {
        for (piece, masses) in span.iter().zip(masses) {
            let totals = &mut totals[piece.position as usize..piece.end() as usize];
            totals.iter_mut().zip(masses).for_each(|(total, mass)| *total += mass);
        }
    }
    for (mass, total) in mass.iter_mut().zip(totals) {
        *mass = f32::from_f64(total);
    }
}

/// Writes what packed rows hold to [R, H].
fn scatter(
    packed: &[f32],
    rows: &[u32],
    kv_head: usize,
    group: usize,
    kv_heads: usize,
    target: &mut [f32],
) {
    for (&row, packed) in rows.iter().zip(packed.chunks_exact(group)) {
        let start = (row as usize * kv_heads + kv_head) * group;
        target[start..start + group].copy_from_slice(packed);
    }
}

/// First pass: log2 Σ 2^score per packed row, and the share of its edge.
fn row_sums<T: Element, C: Element>(
    call: &Call<'_, T, C>,
    rows: &[u32],
    head: usize,
    pieces: &[Piece],
    near: Option<(u32, u32)>,
    tile: &mut Tile,
) -> Sums {
    let mut chunk = RowChunk::new(call, rows, head);
    let group = call.group();
    if let Some((window, sink)) = near {
        let position = |packed: usize| call.queries.positions[rows[packed / group] as usize];
        let near = |packed| Visible::new(position(packed), Some(window), sink);
        chunk.watch_edge((0..rows.len() * group).map(near));
    }
    chunk.attend(call, head, pieces, tile, false);
    let log2 = |state: &crate::row_block::State| {
        let state = *state;
        (0..ROWS).map(move |row| state.log2_sum(row))
    };
    let packed = if near.is_some() { rows.len() * group } else { 0 };
    let edge = (0..packed).map(|packed| chunk.edge_share(packed)).collect();
    Sums { log2: chunk.states.iter().flat_map(log2).collect(), edge }
}

/// Second pass: the mass of the keys of one head's `span`, per piece.
fn span_mass<T: Element, C: Element>(
    call: &Call<'_, T, C>,
    head: usize,
    span: &[Piece],
    chunks: &[&[u32]],
    sums: &[Sums],
) -> Vec<[f64; KEYS]> {
    let mut totals = vec![[0.0f64; KEYS]; span.len()];
    let mut tiles: Vec<Tile> = Vec::with_capacity(span.len());
    for piece in span {
        let mut tile = Tile::new(call.kv.geometry.head_dim);
        tile.load_keys(&call.kv, head, piece);
        tiles.push(tile);
    }
    for (rows, sums) in chunks.iter().zip(sums) {
        let mut chunk = RowChunk::new(call, rows, head);
        let seen = chunk.seen();
        for ((piece, tile), totals) in span.iter().zip(&tiles).zip(&mut totals) {
            if !piece.is_seen(seen) {
                continue;
            }
            let mut mass = [0.0f32; KEYS];
            let rows = chunk.rows(call, piece.delta);
            dispatch(AddMass { rows, tile, piece, log2_sums: &sums.log2, mass: &mut mass });
            totals.iter_mut().zip(mass).for_each(|(total, mass)| *total += f64::from(mass));
        }
    }
    totals
}
