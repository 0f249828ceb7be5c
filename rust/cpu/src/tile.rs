//! The keys and values of one piece, widened to f32 and laid out for the kernels.

use kvweave_core::ops::{Element, Entry, KvView};

use crate::piece::Piece;
use crate::simd::{Kernel, Vector, dispatch};

/// Keys of a tile.
pub(crate) const KEYS: usize = 64;

/// Columns of a value block.
pub(crate) const COLUMNS: usize = 16;

/// Scratch for one piece. Columns from `piece.tokens` on hold what was there before.
pub(crate) struct Tile {
    /// [D] of the keys' d-th elements.
    pub(crate) keys: Vec<[f32; KEYS]>,
    /// [⌈D/16⌉] blocks of [KEYS, 16].
    pub(crate) values: Vec<[[f32; COLUMNS]; KEYS]>,
    /// Whether every value loaded last is finite.
    pub(crate) values_finite: bool,
    rows: Vec<f32>,
    dim: usize,
}

impl Tile {
    pub(crate) fn new(dim: usize) -> Self {
        Self {
            keys: vec![[0.0; KEYS]; dim],
            values: vec![[[0.0; COLUMNS]; KEYS]; dim.div_ceil(COLUMNS)],
            values_finite: true,
            rows: vec![0.0; KEYS * dim],
            dim,
        }
    }

    /// Loads the keys of a piece.
    pub(crate) fn load_keys<T: Element>(&mut self, kv: &KvView<'_, T>, head: usize, piece: &Piece) {
        let dim = self.dim;
        for_each_slot(kv, piece, |i, entry, slot| {
            let start = kv.geometry.key_offset(entry.block, kv.layer, head, slot);
            let row = &mut self.rows[i * dim..(i + 1) * dim];
            T::widen(&kv.cache[start..start + dim], row);
        });
        let (rows, keys) = (&self.rows, &mut self.keys);
        dispatch(Transpose { rows, keys, tokens: piece.tokens });
    }

    /// Loads the values of a piece.
    pub(crate) fn load_values<T: Element>(
        &mut self,
        kv: &KvView<'_, T>,
        head: usize,
        piece: &Piece,
    ) {
        let dim = self.dim;
        for_each_slot(kv, piece, |i, entry, slot| {
            let start = kv.geometry.value_offset(entry.block, kv.layer, head, slot);
            let row = &mut self.rows[i * dim..(i + 1) * dim];
            T::widen(&kv.cache[start..start + dim], row);
        });
        let rows = &self.rows[..piece.tokens * dim];
        self.values_finite = dispatch(Spread { rows, values: &mut self.values, dim });
    }
}

fn for_each_slot<T>(kv: &KvView<'_, T>, piece: &Piece, mut load: impl FnMut(usize, &Entry, usize)) {
    let (mut loaded, mut index, mut skip) = (0, piece.entry, piece.skip);
    while loaded < piece.tokens {
        let entry = Entry::new(kv.entries[index]);
        let count = (entry.tokens() - skip).min(piece.tokens - loaded);
        for i in 0..count {
            load(loaded + i, &entry, entry.begin + skip + i);
        }
        loaded += count;
        index += 1;
        skip = 0;
    }
}

struct Transpose<'a> {
    /// [KEYS, D]
    rows: &'a [f32],
    keys: &'a mut [[f32; KEYS]],
    tokens: usize,
}

impl Kernel for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let dim = self.keys.len();
        let keys = self.keys.as_flattened_mut();
        for key in (0..self.tokens).step_by(8) {
            for d in (0..dim).step_by(8) {
                let source = &self.rows[key * dim + d..];
                V::transpose_8x8(source, dim, &mut keys[d * KEYS + key..], KEYS);
            }
        }
    }
}

/// Deals rows of D values out to blocks of 16 columns; tells whether all are finite.
struct Spread<'a> {
    /// [tokens, D]
    rows: &'a [f32],
    values: &'a mut [[[f32; COLUMNS]; KEYS]],
    dim: usize,
}

impl Kernel for Spread<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) -> bool {
        let mut zeros = V::splat(0.0);
        for (key, row) in self.rows.chunks_exact(self.dim).enumerate() {
            let (columns, rest) = row.as_chunks::<COLUMNS>();
            for (block, columns) in self.values.iter_mut().zip(columns) {
                for i in (0..COLUMNS).step_by(V::LANES) {
                    let x = V::load(&columns[i..]);
                    x.store(&mut block[key][i..]);
                    zeros = x.fma(V::splat(0.0), zeros);
                }
            }
            if !rest.is_empty() {
                let block = &mut self.values[columns.len()][key];
                block[..rest.len()].copy_from_slice(rest);
                for i in (0..COLUMNS).step_by(V::LANES) {
                    zeros = V::load(&block[i..]).fma(V::splat(0.0), zeros);
                }
            }
        }
        zeros.sum() == 0.0
    }
}
