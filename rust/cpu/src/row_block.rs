//! The inner loops: a block of rows against a tile of keys.
//!
//! Six rows are taken at once: their 6 × 4 accumulators of 16 lanes fill the AVX-512 registers
//! (6 × 2 of 8 lanes fill AVX2's). Lanes run over keys for the scores and over D for the output, so
//! each element is one chain of multiply-adds in a fixed order, whatever shares its block.
//!
//! The softmax is online, base 2 (log2 e is folded into q): each tile may raise a row's running
//! maximum, which rescales what was summed before (Milakov and Gimelshein, 2018).

use std::ops::Range;

use kvweave_core::ops::Visible;

use crate::piece::{KEYS, Piece};
use crate::simd::{Kernel, Vector, exp2, tanh};
use crate::tile::{COLUMNS, Tile};

/// Rows of a block.
pub(crate) const ROWS: usize = 6;

/// Rows of a block that is half empty, as one row of a decode step over few query heads leaves it.
const HALF: usize = ROWS / 2;

/// Scores of a block, then weights.
#[repr(align(64))]
struct Scores([[f32; KEYS]; ROWS]);

/// Running softmax of a block's rows, base 2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct State {
    /// Largest score so far, −∞ at first.
    pub(crate) top: [f32; ROWS],
    /// Σ 2^(score − top).
    pub(crate) mass: [f32; ROWS],
}

impl State {
    pub(crate) const EMPTY: Self = Self { top: [f32::NEG_INFINITY; ROWS], mass: [0.0; ROWS] };

    /// log2 Σ 2^score of a row: −∞ for no mass.
    pub(crate) fn log2_sum(&self, row: usize) -> f32 {
        self.top[row] + self.mass[row].log2()
    }
}

/// Rows packed for the kernels, and how their scores are capped.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// [blocks, D] of six rows' d-th elements, scaled.
    pub(crate) q: &'a [[f32; ROWS]],
    /// [blocks · ROWS] visible positions; none for padding.
    pub(crate) visible: &'a [Visible],
    /// `c · log2 e`, where q was divided by the cap c.
    pub(crate) cap: Option<f32>,
}

impl Rows<'_> {
    /// Each row's range of the piece's keys, and the range that holds them all.
    #[inline(always)]
    fn ranges(&self, block: usize, piece: &Piece) -> ([(usize, usize); ROWS], Range<usize>) {
        let mut ranges = [(0, 0); ROWS];
        let mut all = Range { start: KEYS, end: 0 };
        for (range, &visible) in ranges.iter_mut().zip(&self.visible[block * ROWS..]) {
            *range = piece.clip(visible);
            if range.0 < range.1 {
                all = all.start.min(range.0)..all.end.max(range.1);
            }
        }
        (ranges, all)
    }

    #[inline(always)]
    fn scores<V: Vector, const C: usize, const R: usize>(
        &self,
        block: usize,
        tile: &Tile,
        scores: &mut Scores,
    ) {
        let keys = tile.keys();
        let dim = keys.len();
        let q = &self.q[block * dim..(block + 1) * dim];
        for column in (0..KEYS).step_by(C * V::LANES) {
            let mut sums = [[V::splat(0.0); C]; R];
            for (q, keys) in q.iter().zip(keys) {
                let mut k = [V::splat(0.0); C];
                for c in 0..C {
                    k[c] = V::load(&keys[column + c * V::LANES..]);
                }
                for r in 0..R {
                    let q = V::splat(q[r]);
                    for c in 0..C {
                        sums[r][c] = q.fma(k[c], sums[r][c]);
                    }
                }
            }
            for (sums, scores) in sums.iter().zip(&mut scores.0) {
                for (c, &sum) in sums.iter().enumerate() {
                    let score = match self.cap {
                        Some(cap) => tanh(sum).mul(V::splat(cap)),
                        None => sum,
                    };
                    score.store(&mut scores[column + c * V::LANES..]);
                }
            }
        }
    }
}

/// Takes one piece into the softmax state of every block, and into the output if there is one.
pub(crate) struct Absorb<'a> {
    pub(crate) rows: Rows<'a>,
    pub(crate) tile: &'a Tile,
    pub(crate) piece: &'a Piece,
    /// [blocks]
    pub(crate) states: &'a mut [State],
    /// [blocks, ROWS, width], not yet divided by the mass; empty where only the mass is wanted.
    pub(crate) out: &'a mut [f32],
    /// Mass to be told apart from the rest.
    pub(crate) edge: Option<Edge<'a>>,
}

/// The part of each row's mass that lies on some of its positions.
pub(crate) struct Edge<'a> {
    /// [blocks · ROWS] positions `[first, end)`.
    pub(crate) positions: &'a [(i64, i64)],
    /// [blocks] Σ 2^(score − top) over them.
    pub(crate) mass: &'a mut [[f32; ROWS]],
}

impl Edge<'_> {
    /// Takes one piece in, whose weights stand in `scores`.
    #[inline(always)]
    fn absorb<V: Vector, const R: usize>(
        &mut self,
        block: usize,
        piece: &Piece,
        scores: &Scores,
        rescale: &[f32; COLUMNS],
    ) {
        for (r, rescale) in rescale[..R].iter().enumerate() {
            let (low, high) = piece.clip_to(self.positions[block * ROWS + r]);
            let mut weights = [0.0; KEYS];
            weights[low..high].copy_from_slice(&scores.0[r][low..high]);
            let mut sum = V::splat(0.0);
            for column in (0..KEYS).step_by(V::LANES) {
                sum = sum.add(V::load(&weights[column..]));
            }
            let mass = &mut self.mass[block][r];
            *mass = *mass * rescale + sum.sum();
        }
    }
}

impl Kernel for Absorb<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(mut self) {
        let mut scores = Scores([[0.0; KEYS]; ROWS]);
        for block in 0..self.states.len() {
            let (ranges, all) = self.rows.ranges(block, self.piece);
            if all.is_empty() {
                continue;
            }
            let half = ranges[HALF..].iter().all(|&(low, high)| low == high);
            if half {
                self.block::<V, C, HALF>(block, &ranges, all, &mut scores);
            } else {
                self.block::<V, C, ROWS>(block, &ranges, all, &mut scores);
            }
        }
    }
}

impl Absorb<'_> {
    /// Takes the piece into the first R rows of a block, which are all that see any of it.
    #[inline(always)]
    fn block<V: Vector, const C: usize, const R: usize>(
        &mut self,
        block: usize,
        ranges: &[(usize, usize); ROWS],
        all: Range<usize>,
        scores: &mut Scores,
    ) {
        self.rows.scores::<V, C, R>(block, self.tile, scores);
        let rescale = weigh::<V, R>(scores, ranges, &mut self.states[block]);
        if let Some(edge) = &mut self.edge {
            edge.absorb::<V, R>(block, self.piece, scores, &rescale);
        }
        if self.out.is_empty() {
            return;
        }
        let width = self.tile.width;
        let out = &mut self.out[block * ROWS * width..(block + 1) * ROWS * width];
        if self.tile.values_finite {
            add_values::<V, C, R>(&scores.0, &rescale, self.tile, all, out);
            return;
        }
        // 0 · NaN is NaN: a row must not touch a value that it does not see.
        for (r, out) in out.chunks_exact_mut(width).take(R).enumerate() {
            let range = ranges[r].0..ranges[r].1;
            add_values::<V, C, 1>(&scores.0[r..], &rescale[r..], self.tile, range, out);
        }
    }
}

/// Turns scores into weights `2^(score − top)`, 0 outside the ranges; returns the factors for what
/// was summed under the old maximum.
#[inline(always)]
fn weigh<V: Vector, const R: usize>(
    scores: &mut Scores,
    ranges: &[(usize, usize); ROWS],
    state: &mut State,
) -> [f32; COLUMNS] {
    let mut rescale = [0.0; COLUMNS];
    let mut bases = [0.0; ROWS];
    for r in 0..R {
        let (low, high) = ranges[r];
        if high - low < KEYS {
            scores.0[r][..low].fill(f32::NEG_INFINITY);
            scores.0[r][high..].fill(f32::NEG_INFINITY);
        }
        let mut top = V::splat(state.top[r]);
        for column in (0..KEYS).step_by(V::LANES) {
            top = V::load(&scores.0[r][column..]).max_or(top);
        }
        let top = top.max_lane();
        // With no finite score yet, any base does: all weights are 0 (or NaN).
        bases[r] = if top == f32::NEG_INFINITY { 0.0 } else { top };
        rescale[r] = state.top[r] - bases[r];
        state.top[r] = top;
    }
    for column in (0..COLUMNS).step_by(V::LANES) {
        exp2(V::load(&rescale[column..])).store(&mut rescale[column..]);
    }
    for r in 0..R {
        let mut sum = V::splat(0.0);
        for column in (0..KEYS).step_by(V::LANES) {
            let weight = exp2(V::load(&scores.0[r][column..]).sub(V::splat(bases[r])));
            weight.store(&mut scores.0[r][column..]);
            sum = sum.add(weight);
        }
        state.mass[r] = state.mass[r] * rescale[r] + sum.sum();
    }
    rescale
}

/// `out = out · rescale + weights · values` over the keys `range` for R rows.
#[inline(always)]
fn add_values<V: Vector, const C: usize, const R: usize>(
    weights: &[[f32; KEYS]],
    rescale: &[f32],
    tile: &Tile,
    range: Range<usize>,
    out: &mut [f32],
) {
    let width = tile.width;
    let mut column = 0;
    while column + C * V::LANES <= width {
        add_columns::<V, C, R>(weights, rescale, tile, range.clone(), out, column);
        column += C * V::LANES;
    }
    while column < width {
        add_columns::<V, 1, R>(weights, rescale, tile, range.clone(), out, column);
        column += V::LANES;
    }
}

#[inline(always)]
fn add_columns<V: Vector, const C: usize, const R: usize>(
    weights: &[[f32; KEYS]],
    rescale: &[f32],
    tile: &Tile,
    range: Range<usize>,
    out: &mut [f32],
    column: usize,
) {
    let width = tile.width;
    let weights = &weights[..R];
    assert!(range.end <= KEYS, "keys of one tile");
    let mut sums = [[V::splat(0.0); C]; R];
    for c in 0..C {
        for r in 0..R {
            let old = V::load(&out[r * width + column + c * V::LANES..]);
            sums[r][c] = old.mul(V::splat(rescale[r]));
        }
    }
    for key in range {
        let columns = &tile.values[key * width + column..][..C * V::LANES];
        let mut v = [V::splat(0.0); C];
        for c in 0..C {
            v[c] = V::load(&columns[c * V::LANES..]);
        }
        for r in 0..R {
            let weight = V::splat(weights[r][key]);
            for c in 0..C {
                sums[r][c] = weight.fma(v[c], sums[r][c]);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            sums[r][c].store(&mut out[r * width + column + c * V::LANES..]);
        }
    }
}

/// Adds the softmax mass that every row gives to every key of a piece.
pub(crate) struct AddMass<'a> {
    pub(crate) rows: Rows<'a>,
    pub(crate) tile: &'a Tile,
    pub(crate) piece: &'a Piece,
    /// [blocks · ROWS] log2 Σ 2^score of each row.
    pub(crate) log2_sums: &'a [f32],
    pub(crate) mass: &'a mut [f32; KEYS],
}

impl Kernel for AddMass<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let mut scores = Scores([[0.0; KEYS]; ROWS]);
        for (block, sums) in self.log2_sums.chunks_exact(ROWS).enumerate() {
            let (ranges, all) = self.rows.ranges(block, self.piece);
            if all.is_empty() {
                continue;
            }
            self.rows.scores::<V, C, ROWS>(block, self.tile, &mut scores);
            for r in 0..ROWS {
                let (low, high) = ranges[r];
                if low == high || sums[r] == f32::NEG_INFINITY {
                    continue;
                }
                for column in (0..KEYS).step_by(V::LANES) {
                    let score = V::load(&scores.0[r][column..]);
                    exp2(score.sub(V::splat(sums[r]))).store(&mut scores.0[r][column..]);
                }
                for (mass, weight) in self.mass[low..high].iter_mut().zip(&scores.0[r][low..high]) {
                    *mass += weight;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
