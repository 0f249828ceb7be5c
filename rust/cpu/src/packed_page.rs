//! Codes of a packed page into numbers, several at a time.

use std::array;
use std::ops::Range;

use kvweave_core::ops::{PackedFormat, ScaleDtype, Step, WideStep};

use crate::simd::{Kernel, Vector};

/// Tokens whose value codes lie together.
pub(crate) const UNIT: usize = 16;
/// Bytes of a word of codes.
const WORD: usize = 4;

/// Where channels 8w to 8w + 7 of a key begin in their word.
pub(crate) const KEY_SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];
/// Where the tokens of [`tokens_of`] begin in their words: channels 8 further on are 4 bits behind.
pub(crate) const VALUE_SHIFTS: [u32; 4] = [0, 16, 8, 24];

/// The four tokens of a unit that words of a lane hold.
#[inline(always)]
pub(crate) fn tokens_of(unit: usize, lane: usize) -> [usize; 4] {
    let first = UNIT * unit + 2 * lane;
    [first, first + 1, first + 8, first + 9]
}

/// Of a unit's words, those with channels 16 `tile` to 16 `tile` + 7 of such tokens.
#[inline(always)]
pub(crate) fn words_of(format: &PackedFormat, tile: usize, lane: usize) -> [usize; 8] {
    let first = format.value_word(2 * lane, UNIT * tile);
    array::from_fn(|group| first + 4 * format.value_run() * group)
}

/// The code at a bit of a word.
#[inline(always)]
fn number(word: i32, shift: u32) -> f32 {
    (word >> shift & 15) as f32
}

/// One page, its parts told apart.
#[derive(Clone, Copy)]
pub(crate) struct PackedPage<'a> {
    format: &'a PackedFormat,
    bytes: &'a [u8],
}

impl<'a> PackedPage<'a> {
    pub(crate) fn new(format: &'a PackedFormat, bytes: &'a [u8]) -> Self {
        Self { format, bytes }
    }

    fn part(&self, range: Range<usize>) -> &'a [u8] {
        &self.bytes[range]
    }

    fn value_step(&self, token: usize) -> WideStep {
        let at = self.format.value_scale(token);
        let (scale, zero) = (bits_at(self.bytes, at), bits_at(self.bytes, at + 2));
        Step { scale, zero }.widen(self.format.scales())
    }
}

/// Keys of consecutive slots into rows [slots, D].
pub(crate) struct PackedKeys<'a> {
    pub(crate) page: PackedPage<'a>,
    pub(crate) slots: Range<usize>,
    pub(crate) rows: &'a mut [f32],
}

impl Kernel for PackedKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { page, slots, rows } = self;
        let (format, dim) = (page.format, page.format.head_dim());
        let scales = widened(page.part(format.key_scales()), format.scales());
        let zeros = widened(page.part(format.key_zeros()), format.scales());
        if format.code_bits() == 8 {
            let codes = &page.part(format.key_codes())[slots.start * dim..];
            for (row, codes) in rows.chunks_exact_mut(dim).zip(codes.chunks_exact(dim)) {
                let steps = scales.iter().zip(&zeros);
                for ((x, &code), (scale, zero)) in row.iter_mut().zip(codes).zip(steps) {
                    *x = zero + scale * f32::from(code);
                }
            }
            return;
        }
        let row_bytes = dim / 2;
        let codes = &page.part(format.key_codes())[slots.start * row_bytes..];
        for (row, codes) in rows.chunks_exact_mut(dim).zip(codes.chunks_exact(row_bytes)) {
            let eights = row.as_chunks_mut::<8>().0.iter_mut();
            let steps = scales.as_chunks::<8>().0.iter().zip(zeros.as_chunks::<8>().0);
            for ((row, word), (scale, zero)) in eights.zip(codes.as_chunks::<WORD>().0).zip(steps) {
                let word = i32::from_le_bytes(*word);
                *row = array::from_fn(|c| zero[c] + scale[c] * number(word, KEY_SHIFTS[c]));
            }
        }
    }
}

/// Values of consecutive slots into rows [slots, width].
pub(crate) struct PackedValues<'a> {
    pub(crate) page: PackedPage<'a>,
    pub(crate) slots: Range<usize>,
    pub(crate) rows: &'a mut [f32],
    pub(crate) width: usize,
}

impl Kernel for PackedValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { page, slots, rows, width } = self;
        let (format, dim) = (page.format, page.format.head_dim());
        let codes = page.part(format.value_codes());
        let steps: Vec<WideStep> = slots.clone().map(|token| page.value_step(token)).collect();
        if format.code_bits() == 8 {
            let codes = codes[slots.start * dim..].chunks_exact(dim);
            for ((row, codes), step) in rows.chunks_exact_mut(width).zip(codes).zip(&steps) {
                for (x, &code) in row.iter_mut().zip(codes) {
                    *x = step.zero + step.scale * f32::from(code);
                }
            }
            return;
        }
        let codes = codes.as_chunks::<WORD>().0;
        for unit in slots.start / UNIT..slots.end.div_ceil(UNIT) {
            let codes = &codes[unit * 2 * dim..][..2 * dim];
            for tile in 0..dim / UNIT {
                for lane in 0..UNIT / 4 {
                    // Those of all eight channels that four tokens share words of.
                    let words =
                        words_of(format, tile, lane).map(|at| i32::from_le_bytes(codes[at]));
                    for (place, token) in tokens_of(unit, lane).into_iter().enumerate() {
                        if !slots.contains(&token) {
                            continue;
                        }
                        let WideStep { scale, zero } = steps[token - slots.start];
                        let row = &mut rows[(token - slots.start) * width + UNIT * tile..][..UNIT];
                        let (low, high) = row.split_at_mut(UNIT / 2);
                        let shift = VALUE_SHIFTS[place];
                        let of = |more| words.map(|x| zero + scale * number(x, shift + more));
                        low.copy_from_slice(&of(0));
                        high.copy_from_slice(&of(4));
                    }
                }
            }
        }
    }
}

/// Scales or zeros as numbers.
fn widened(bytes: &[u8], scales: ScaleDtype) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|bits| scales.widen(u16::from_le_bytes(*bits))).collect()
}

fn bits_at(page: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([page[at], page[at + 1]])
}
