//! The keys and values of one piece, widened to f32 and laid out for the kernels.

use kvweave_core::ops::{Element, Entry, KvView, PackedKv};

use crate::aligned::Aligned;
use crate::packed_page::{PackedKeys, PackedPage, PackedValues};
use crate::piece::{KEYS, Piece};
use crate::simd::{Kernel, Vector, dispatch};

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

    /// Brings in the keys and values of a piece of packed pages; `pages` are those of the call.
    pub(crate) fn load_packed(
        &mut self,
        (packed, pages): (&PackedKv<'_>, &KvView<'_, ()>),
        rank: usize,
        piece: &Piece,
    ) {
        let (dim, width) = (self.dim, self.width);
        for_each_run(pages, piece, |run| {
            let page = PackedPage::new(&packed.format, packed.page(run.block, rank));
            let slots = run.slot..run.slot + run.tokens;
            dispatch(PackedKeys {
                page,
                slots: slots.clone(),
                rows: &mut self.rows[run.first * dim..][..run.tokens * dim],
            });
            dispatch(PackedValues {
                page,
                slots,
                rows: &mut self.values[run.first * width..][..run.tokens * width],
                width,
            });
        });
        let (rows, keys) = (&self.rows, &mut self.keys);
        dispatch(Transpose { rows, keys, dim, tokens: piece.tokens });
        self.values_finite = dispatch(Finite(&self.values[..piece.tokens * width]));
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
        for_each_run(kv, piece, |run| {
            let start = kv.value_offset(run.block, head, run.slot);
            let (cache, stride) = (&kv.cache[start..], kv.geometry.token_stride);
            let target = &mut self.values[run.first * width..];
            load_rows(cache, stride, run.tokens, dim, target, width);
        });
        self.values_finite = dispatch(Finite(&self.values[..piece.tokens * width]));
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

/// Widens strided rows of D elements into rows of `width`.
fn load_rows<T: Element>(
    source: &[T],
    stride: usize,
    tokens: usize,
    dim: usize,
    target: &mut [f32],
    width: usize,
) {
    if stride == dim && width == dim {
        return T::widen(&source[..tokens * dim], &mut target[..tokens * dim]);
    }
    for token in 0..tokens {
        let row = &source[token * stride..][..dim];
        T::widen(row, &mut target[token * width..][..dim]);
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
        // Four chains, as one would wait for each addition.
        let mut zeros = [V::splat(0.0); 4];
        let fours = self.0.chunks_exact(4 * V::LANES);
        let rest = fours.remainder().chunks_exact(V::LANES);
        for four in fours {
            for c in 0..4 {
                zeros[c] = V::load(&four[c * V::LANES..]).fma(V::splat(0.0), zeros[c]);
            }
        }
        for x in rest {
            zeros[0] = V::load(x).fma(V::splat(0.0), zeros[0]);
        }
        zeros[0].add(zeros[1]).add(zeros[2].add(zeros[3])).sum() == 0.0
    }
}
