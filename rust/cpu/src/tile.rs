//! The keys and values of one piece, widened to f32 and laid out for the kernels.

use kvweave_core::ops::{Element, Entry, KvView};

use crate::aligned::Aligned;
use crate::piece::Piece;
use crate::simd::{Kernel, Vector, dispatch};

/// Keys of a tile.
pub(crate) const KEYS: usize = 64;

/// Value rows are padded to a multiple of this, the widest vector.
pub(crate) const COLUMNS: usize = 16;

/// Scratch for one piece. Columns from `piece.tokens` on hold what was there before.
pub(crate) struct Tile {
    /// [D, KEYS]
    keys: Aligned,
    /// [KEYS, width], zeros from D on.
    pub(crate) values: Aligned,
    /// D rounded up to whole [`COLUMNS`].
    pub(crate) width: usize,
    /// Whether every value loaded last is finite.
    pub(crate) values_finite: bool,
    rows: Aligned,
    dim: usize,
}

impl Tile {
    pub(crate) fn new(dim: usize) -> Self {
        let width = dim.next_multiple_of(COLUMNS);
        Self {
            keys: Aligned::zeroed(KEYS * dim),
            values: Aligned::zeroed(KEYS * width),
            width,
            values_finite: true,
            rows: Aligned::zeroed(KEYS * dim),
            dim,
        }
    }

    /// Loads the keys of a piece.
    pub(crate) fn load_keys<T: Element>(&mut self, kv: &KvView<'_, T>, head: usize, piece: &Piece) {
        let dim = self.dim;
        for_each_run(kv, piece, |run| {
            let start = kv.key_offset(run.block, head, run.slot);
            let target = &mut self.rows[run.first * dim..];
            load_rows(&kv.cache[start..], kv.geometry.token_stride, run.tokens, dim, target, dim);
        });
        let (rows, keys) = (&self.rows, &mut self.keys);
        dispatch(Transpose { rows, keys, dim, tokens: piece.tokens });
    }

    /// [D] of the keys' d-th elements.
    pub(crate) fn keys(&self) -> &[[f32; KEYS]] {
        self.keys.as_chunks().0
    }

    #[cfg(test)]
    pub(crate) fn keys_mut(&mut self) -> &mut [[f32; KEYS]] {
        self.keys.as_chunks_mut().0
    }

    /// Loads the values of a piece.
    pub(crate) fn load_values<T: Element>(
        &mut self,
        kv: &KvView<'_, T>,
        head: usize,
        piece: &Piece,
    ) {
        let (dim, width) = (self.dim, self.width);
        self.values_finite = true;
        for_each_run(kv, piece, |run| {
            let start = kv.value_offset(run.block, head, run.slot);
            let (cache, stride) = (&kv.cache[start..], kv.geometry.token_stride);
            let target = &mut self.values[run.first * width..];
            self.values_finite &= load_rows(cache, stride, run.tokens, dim, target, width);
        });
    }
}

/// Tokens of a piece in consecutive slots of one block.
struct Run {
    block: usize,
    slot: usize,
    tokens: usize,
    /// Keys of the piece before it.
    first: usize,
}

fn for_each_run<T>(kv: &KvView<'_, T>, piece: &Piece, mut load: impl FnMut(Run)) {
    let (mut first, mut index, mut skip) = (0, piece.entry, piece.skip);
    while first < piece.tokens {
        let entry = Entry::new(kv.entries[index]);
        let tokens = (entry.tokens() - skip).min(piece.tokens - first);
        load(Run { block: entry.block, slot: entry.begin + skip, tokens, first });
        first += tokens;
        index += 1;
        skip = 0;
    }
}

/// Widens strided rows of D elements into rows of `width`; tells whether all are finite.
fn load_rows<T: Element>(
    source: &[T],
    stride: usize,
    tokens: usize,
    dim: usize,
    target: &mut [f32],
    width: usize,
) -> bool {
    if let Some(source) = T::as_f32(source) {
        return dispatch(CopyRows { source, stride, tokens, dim, target, width });
    }
    for token in 0..tokens {
        let row = &source[token * stride..][..dim];
        T::widen(row, &mut target[token * width..][..dim]);
    }
    dispatch(Finite(&target[..tokens * width]))
}

/// Copies strided rows of D floats, D a multiple of 8; tells whether all are finite.
struct CopyRows<'a> {
    source: &'a [f32],
    stride: usize,
    tokens: usize,
    dim: usize,
    target: &'a mut [f32],
    width: usize,
}

impl Kernel for CopyRows<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) -> bool {
        let mut zeros = [V::splat(0.0); 4];
        for token in 0..self.tokens {
            let source = &self.source[token * self.stride..][..self.dim];
            let target = &mut self.target[token * self.width..][..self.dim];
            let (sources, rest) = source.as_chunks::<COLUMNS>();
            let (targets, rest_of_target) = target.as_chunks_mut::<COLUMNS>();
            for (i, (source, target)) in sources.iter().zip(targets).enumerate() {
                for at in (0..COLUMNS).step_by(V::LANES) {
                    let x = V::load(&source[at..]);
                    x.store(&mut target[at..]);
                    zeros[i % 4] = x.fma(V::splat(0.0), zeros[i % 4]);
                }
            }
            if !rest.is_empty() {
                rest_of_target.copy_from_slice(rest);
                let mut padded = [0.0; COLUMNS];
                padded[..rest.len()].copy_from_slice(rest);
                for at in (0..COLUMNS).step_by(V::LANES) {
                    zeros[0] = V::load(&padded[at..]).fma(V::splat(0.0), zeros[0]);
                }
            }
        }
        zeros[0].add(zeros[1]).add(zeros[2].add(zeros[3])).sum() == 0.0
    }
}

struct Transpose<'a> {
    /// [KEYS, D]
    rows: &'a [f32],
    /// [D, KEYS]
    keys: &'a mut [f32],
    dim: usize,
    tokens: usize,
}

impl Kernel for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let dim = self.dim;
        for key in (0..self.tokens).step_by(8) {
            for d in (0..dim).step_by(8) {
                let source = &self.rows[key * dim + d..];
                V::transpose_8x8(source, dim, &mut self.keys[d * KEYS + key..], KEYS);
            }
        }
    }
}

/// Whether all numbers are finite; their count is a multiple of [`COLUMNS`].
struct Finite<'a>(&'a [f32]);

impl Kernel for Finite<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) -> bool {
        let mut zeros = V::splat(0.0);
        for x in self.0.chunks_exact(V::LANES) {
            zeros = V::load(x).fma(V::splat(0.0), zeros);
        }
        zeros.sum() == 0.0
    }
}
