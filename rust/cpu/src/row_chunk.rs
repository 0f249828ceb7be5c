//! A chunk of rows of one KV head, taken through the pieces of its request.

use kvweave_core::ops::{Element, KvView, Queries, Scoring, Visible};

use crate::aligned::Aligned;
use crate::piece::{Piece, within};
use crate::row_block::{Absorb, Edge, ROWS, Rows, State};
use crate::simd::dispatch;
use crate::tile::{COLUMNS, Tile};
use crate::turn::Turns;

/// What every chunk of a call shares.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a, T, C> {
    pub(crate) queries: Queries<'a, T>,
    pub(crate) kv: KvView<'a, C>,
    pub(crate) scoring: Scoring<'a>,
    pub(crate) turns: &'a Turns,
}

impl<T, C> Call<'_, T, C> {
    /// Query heads per KV head.
    pub(crate) fn group(&self) -> usize {
        self.queries.vectors.heads / self.kv.geometry.kv_heads
    }
}

/// Rows × the query heads of one KV head, packed row-major into blocks of six.
pub(crate) struct RowChunk {
    /// [blocks, D]
    q: Vec<[f32; ROWS]>,
    /// `q` turned by −`turned_by`, where that is not 0.
    turned: Vec<[f32; ROWS]>,
    turned_by: i32,
    visible: Vec<Visible>,
    cap: Option<f32>,
    dim: usize,
    packed: usize,
    /// [blocks]
    pub(crate) states: Vec<State>,
    /// [blocks, ROWS, width]
    out: Aligned,
    edge: Option<WatchedEdge>,
}

/// The positions of each packed row whose mass is told apart.
struct WatchedEdge {
    positions: Vec<(i64, i64)>,
    mass: Vec<[f32; ROWS]>,
}

impl RowChunk {
    /// Packs the given rows for a KV head.
    pub(crate) fn new<T: Element, C>(call: &Call<'_, T, C>, rows: &[u32], kv_head: usize) -> Self {
        let dim = call.kv.geometry.head_dim;
        let group = call.group();
        let packed = rows.len() * group;
        let blocks = packed.div_ceil(ROWS);
        let log2_e = std::f32::consts::LOG2_E;
        let scale = call.scoring.scale * call.kv.scales.key;
        let (factor, cap) = match call.scoring.softcap {
            Some(cap) => (scale / cap, Some(cap * log2_e)),
            None => (scale * log2_e, None),
        };
        let mut q = vec![[0.0; ROWS]; blocks * dim];
        let mut visible = vec![Visible::default(); blocks * ROWS];
        let reach = call.kv.head(kv_head, &call.scoring);
        let mut wide = vec![0.0; dim];
        for (i, visible) in visible.iter_mut().enumerate().take(packed) {
            let row = rows[i / group] as usize;
            let head = kv_head * group + i % group;
            *visible = reach.visible(call.queries.positions[row]);
            T::widen(call.queries.vectors.vector(row, head), &mut wide);
            let block = &mut q[i / ROWS * dim..(i / ROWS + 1) * dim];
            for (lanes, x) in block.iter_mut().zip(&wide) {
                lanes[i % ROWS] = x * factor;
            }
        }
        let states = vec![State::EMPTY; blocks];
        let (turned, out) = (Vec::new(), Aligned::zeroed(0));
        Self { q, turned, turned_by: 0, visible, cap, dim, packed, states, out, edge: None }
    }

    /// Has `attend` tell apart the mass of keys that are not `near` a row: what lies between the
    /// sink and the window of that.
    pub(crate) fn watch_edge(&mut self, positions: impl Iterator<Item = Visible>) {
        let mut edges: Vec<_> = positions.map(|near| (near.sink, near.first)).collect();
        let mass = vec![[0.0; ROWS]; self.states.len()];
        edges.resize(mass.len() * ROWS, (0, 0));
        self.edge = Some(WatchedEdge { positions: edges, mass });
    }

    /// The positions seen by any of its rows.
    pub(crate) fn seen(&self) -> Visible {
        let rows = &self.visible[..self.packed];
        let first = rows.iter().map(|row| row.first).min().unwrap_or(0);
        let end = rows.iter().map(|row| row.end).max().unwrap_or(0);
        // A row near the start, to which sink and window are one, brings first to 0.
        let sink = if first == 0 { 0 } else { rows[0].sink };
        Visible { sink, first, end }
    }

    /// The rows as the kernels want them, turned by −delta: once per run of pieces of one delta.
    pub(crate) fn rows<T, C>(&mut self, call: &Call<'_, T, C>, delta: i32) -> Rows<'_> {
        if delta != 0 && delta != self.turned_by {
            let turn = call.turns.get(call.scoring.rope, call.kv.layer, delta);
            self.turned.resize(self.q.len(), [0.0; ROWS]);
            let blocks = self.q.chunks_exact(self.dim);
            for (q, turned) in blocks.zip(self.turned.chunks_exact_mut(self.dim)) {
                turn.backward(q, turned);
            }
            self.turned_by = delta;
        }
        let q = if delta == 0 { &self.q } else { &self.turned };
        Rows { q, visible: &self.visible, cap: self.cap }
    }

    /// Attends to the pieces seen: softmax states and, with `values`, the output.
    pub(crate) fn attend<T, C: Element>(
        &mut self,
        call: &Call<'_, T, C>,
        kv_head: usize,
        pieces: &[Piece],
        tile: &mut Tile,
        values: bool,
    ) {
        self.attend_loaded(call, pieces, tile, values, |tile, piece| {
            tile.load_keys(&call.kv, kv_head, piece);
            if values {
                tile.load_values(&call.kv, kv_head, piece);
            }
        });
    }

    /// The same of pieces that `load` brings into the tile.
    pub(crate) fn attend_loaded<T, C>(
        &mut self,
        call: &Call<'_, T, C>,
        pieces: &[Piece],
        tile: &mut Tile,
        values: bool,
        mut load: impl FnMut(&mut Tile, &Piece),
    ) {
        let width = self.dim.next_multiple_of(COLUMNS);
        let mut out = Aligned::zeroed(if values { self.states.len() * ROWS * width } else { 0 });
        let mut states = std::mem::take(&mut self.states);
        let mut edge = self.edge.take();
        for piece in within(pieces, self.seen()).into_iter().flatten() {
            load(tile, piece);
            let rows = self.rows(call, piece.delta);
            let (states, out) = (&mut states, &mut out);
            let edge = edge.as_mut().map(|edge| {
                let (positions, mass) = (&edge.positions[..], &mut edge.mass[..]);
                Edge { positions, mass }
            });
            dispatch(Absorb { rows, tile, piece, states, out, edge });
        }
        (self.states, self.out, self.edge) = (states, out, edge);
    }

    /// Share of a packed row's mass on its watched edge.
    pub(crate) fn edge_share(&self, packed: usize) -> f32 {
        let (block, r) = (packed / ROWS, packed % ROWS);
        let mass = self.states[block].mass[r];
        let edge = self.edge.as_ref().map_or(0.0, |edge| edge.mass[block][r]);
        if mass == 0.0 { 0.0 } else { edge / mass }
    }

    /// Softmax state and undivided output [D] of a packed row: (top, mass, out).
    pub(crate) fn partial(&self, packed: usize) -> (f32, f32, &[f32]) {
        let width = self.dim.next_multiple_of(COLUMNS);
        let (state, r) = (&self.states[packed / ROWS], packed % ROWS);
        (state.top[r], state.mass[r], &self.out[packed * width..][..self.dim])
    }
}

/// Divides an undivided output by its mass, brings it to the values' `scale`, rounds it once and
/// returns the natural log-sum-exp.
pub(crate) fn finish<T: Element>(
    (top, mass): (f32, f32),
    scale: f32,
    sums: &mut [f32],
    out: &mut [T],
) -> f32 {
    if mass == 0.0 && sums.iter().all(|sum| *sum == 0.0) {
        out.fill(T::default());
        return f32::NEG_INFINITY;
    }
    for sum in &mut *sums {
        // Adding zero turns −0 into 0, whose sign could tell how many unseen keys a tile held.
        *sum = *sum / mass * scale + 0.0;
    }
    T::narrow(sums, out);
    (top + mass.log2()) * std::f32::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::finish;

    #[test]
    fn the_sign_of_zero_is_settled() {
        let mut out = [9.0f32; 2];
        finish((0.0, 2.0), 1.0, &mut [-0.0, 3.0], &mut out);
        assert_eq!(out.map(f32::to_bits), [0.0f32, 1.5].map(f32::to_bits));
    }

    #[test]
    fn no_mass_is_no_output() {
        let mut out = [9.0f32; 2];
        let lse = finish((f32::NEG_INFINITY, 0.0), 1.0, &mut [0.0; 2], &mut out);
        assert_eq!((out, lse), ([0.0; 2], f32::NEG_INFINITY));
    }
}
