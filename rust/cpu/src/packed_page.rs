//! Codes of a packed page into numbers, several at a time.

use std::ops::Range;

use kvweave_core::ops::{PackedFormat, ScaleDtype, Step, WideStep};

use crate::simd::{Kernel, Vector};

/// Tokens whose value codes lie together.
const UNIT: usize = 16;
/// Bytes of a word of codes.
const WORD: usize = 4;

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
        let row_bytes = dim / 2;
        let codes = &page.part(format.key_codes())[slots.start * row_bytes..];
        for (row, codes) in rows.chunks_exact_mut(dim).zip(codes.chunks_exact(row_bytes)) {
            let eights = row.as_chunks_mut::<8>().0.iter_mut();
            let steps = scales.as_chunks::<8>().0.iter().zip(zeros.as_chunks::<8>().0);
            for ((row, word), (scale, zero)) in eights.zip(codes.as_chunks::<WORD>().0).zip(steps) {
                let word = u32::from_le_bytes(*word);
                for channel in 0..8 {
                    let nibble = channel / 2 + 4 * (channel % 2);
                    let code = (word >> (4 * nibble) & 15) as f32;
                    row[channel] = zero[channel] + scale[channel] * code;
                }
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
        let codes = page.part(format.value_codes()).as_chunks::<WORD>().0;
        let run = format.value_run();
        for (token, row) in slots.zip(rows.chunks_exact_mut(width)) {
            let step = page.value_step(token);
            let (unit, of_unit) = (token / UNIT, token % UNIT);
            let shift = 8 * (of_unit / 8) + 16 * (of_unit % 2);
            let codes = &codes[unit * 2 * dim..][..2 * dim];
            for (tile, row) in row[..dim].as_chunks_mut::<UNIT>().0.iter_mut().enumerate() {
                let first = format.value_word(of_unit, UNIT * tile);
                for group in 0..8 {
                    // The words of a lane lie side by side, and four lanes have a channel.
                    let word = u32::from_le_bytes(codes[first + 4 * run * group]) >> shift;
                    row[group] = step.zero + step.scale * (word & 15) as f32;
                    row[group + 8] = step.zero + step.scale * (word >> 4 & 15) as f32;
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
