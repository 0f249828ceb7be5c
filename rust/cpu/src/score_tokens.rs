//! Attention mass of every key, in two passes and without the score matrix.
//!
//! First the log-sum-exp of every (row, head), as in prefill but without values; then, per key
//! tile, the weights again and their sum over rows. Sums run in f32 within a chunk of rows and in
//! f64 over chunks and heads, always in the same order.

use kvweave_core::ops::{Element, OpError, ScoreTokens};
use rayon::prelude::*;

use crate::piece::{Piece, cut, within};
use crate::row_block::{AddMass, ROWS};
use crate::row_chunk::{Call, RowChunk};
use crate::simd::dispatch;
use crate::tile::{KEYS, Tile};
use crate::turn::Turns;

/// Rows × query heads of a chunk; a constant, as sums over rows follow the chunks.
const CHUNK: usize = 384;

/// Pieces of one task of the second pass.
const SPAN: usize = 8;

/// See [`ScoreTokens`].
///
/// # Errors
/// What [`ScoreTokens::validate`] refuses.
pub fn score_tokens<T: Element>(params: ScoreTokens<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let ScoreTokens { queries, kv, scoring, mass } = params;
    let turns = Turns::new(scoring.rope, kv.entries.iter().map(|row| (kv.layer, row[4])));
    let call = Call { queries, kv, scoring, turns: &turns };
    let pieces = cut(kv.entries, 0..kv.entries.len());
    let mut order: Vec<u32> = (0..queries.vectors.rows as u32).collect();
    order.sort_by_key(|&row| queries.positions[row as usize]);
    let chunks: Vec<&[u32]> = order.chunks(CHUNK.div_ceil(call.group())).collect();
    let heads = kv.geometry.kv_heads;
    let tasks: Vec<(usize, &[u32])> =
        (0..heads).flat_map(|head| chunks.iter().map(move |&rows| (head, rows))).collect();
    let sums: Vec<Vec<f32>> = tasks
        .par_iter()
        .with_max_len(1)
        .map_init(
            || Tile::new(kv.geometry.head_dim),
            |tile, &(head, rows)| log2_sums(&call, rows, head, &pieces, tile),
        )
        .collect();
    let spans: Vec<(usize, &[Piece])> =
        (0..heads).flat_map(|head| pieces.chunks(SPAN).map(move |span| (head, span))).collect();
    let masses: Vec<Vec<[f64; KEYS]>> = spans
        .par_iter()
        .with_max_len(1)
        .map(|&(head, span)| {
            let sums = &sums[head * chunks.len()..(head + 1) * chunks.len()];
            span_mass(&call, head, span, &chunks, sums)
        })
        .collect();
    let mut totals = vec![0.0f64; mass.len()];
    for ((_, span), masses) in spans.iter().zip(&masses) {
        for (piece, masses) in span.iter().zip(masses) {
            let totals = &mut totals[piece.position as usize..piece.end() as usize];
            totals.iter_mut().zip(masses).for_each(|(total, mass)| *total += mass);
        }
    }
    for (mass, total) in mass.iter_mut().zip(totals) {
        *mass = f32::from_f64(total);
    }
    Ok(())
}

/// First pass: log2 Σ 2^score per packed row.
fn log2_sums<T: Element>(
    call: &Call<'_, T>,
    rows: &[u32],
    head: usize,
    pieces: &[Piece],
    tile: &mut Tile,
) -> Vec<f32> {
    let mut chunk = RowChunk::new(call, rows, head);
    chunk.attend(call, head, pieces, tile, false);
    let sums = |state: &crate::row_block::State| {
        let state = *state;
        (0..ROWS).map(move |row| state.log2_sum(row))
    };
    chunk.states.iter().flat_map(sums).collect()
}

/// Second pass: the mass of the keys of one head's `span`, per piece.
fn span_mass<T: Element>(
    call: &Call<'_, T>,
    head: usize,
    span: &[Piece],
    chunks: &[&[u32]],
    sums: &[Vec<f32>],
) -> Vec<[f64; KEYS]> {
    let mut totals = vec![[0.0f64; KEYS]; span.len()];
    let mut tiles: Vec<Tile> = Vec::with_capacity(span.len());
    for piece in span {
        let mut tile = Tile::new(call.kv.geometry.head_dim);
        tile.load_keys(&call.kv, head, piece);
        tiles.push(tile);
    }
    for (rows, log2_sums) in chunks.iter().zip(sums) {
        let mut chunk = RowChunk::new(call, rows, head);
        let seen = within(span, chunk.reach());
        let Some(first) = seen.first() else { continue };
        let skipped = span.partition_point(|piece| piece.position < first.position);
        for (i, piece) in seen.iter().enumerate() {
            let mut mass = [0.0f32; KEYS];
            let (rows, tile) = (chunk.rows(call, piece.delta), &tiles[skipped + i]);
            dispatch(AddMass { rows, tile, piece, log2_sums, mass: &mut mass });
            let totals = &mut totals[skipped + i];
            totals.iter_mut().zip(mass).for_each(|(total, mass)| *total += f64::from(mass));
        }
    }
    totals
}
