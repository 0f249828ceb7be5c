//! The bytes of a top-r page: of each vector the largest numbers in a rotated basis.
//!
//! A vector x of D channels is `mean + Σ c[j] · direction[j]` in the basis of its text
//! ([`Bases`](super::Bases)), of C directions. Neighbouring numbers c form groups of g; the r / g
//! groups with the most energy are kept (`MosaicKV`, sections 4.2 and 5.1), others are 0. A page
//! has its keys, then its values, either as three parts without gaps, each on a boundary of 16
//! bytes:
//!
//! | part | bytes | what lies there |
//! |---|---|---|
//! | bitmaps | P·⌈C/8g⌉ | bit i of a token, from the lowest of the first byte on: group i is kept |
//! | numbers | P·r·(2, 1, 1/2) | those kept of a token in their order: bf16, fp8 E4M3, codes |
//! | scales | 2·P, none for bf16 | one a vector |
//!
//! A code of four bits stands for `scale · (code − 7.5)`, the lower half of a byte first: numbers
//! that are kept lie on both sides of 0 and none at it. So a page has
//! 2·P·(⌈C/8g⌉ + r·(2, 1, 1/2) + (0, 2, 2)) bytes.

use std::ops::Range;

use half::bf16;

use super::element::Element;
use super::error::{OpError, OpErrorKind, ensure};
use super::fp8::Fp8E4m3;
use super::step::ScaleDtype;

/// What kept numbers are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeptNumbers {
    /// Sixteen bits, without a scale.
    Bf16,
    /// E4M3, times the vector's scale.
    Fp8,
    /// Codes of four bits, times the vector's scale.
    Int4,
}

/// Code 0 of four bits, and code 15, are so many scales from 0.
const INT4_REACH: f32 = 7.5;
const FP8_REACH: f32 = 448.0;

impl KeptNumbers {
    /// The name that it is asked for by.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
        }
    }

    fn bits(self) -> usize {
        match self {
            Self::Bf16 => 16,
            Self::Fp8 => 8,
            Self::Int4 => 4,
        }
    }

    fn scale_bytes(self) -> usize {
        if self == Self::Bf16 { 0 } else { 2 }
    }
}

/// How much of a vector is kept, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TopR {
    /// r: numbers kept of a vector.
    pub kept: usize,
    /// g: neighbours that are kept together.
    pub group: usize,
    /// C: directions of the basis; what lies along others is left out of every vector.
    pub channels: usize,
    /// What they are stored as.
    pub numbers: KeptNumbers,
}

impl TopR {
    /// Checks it for vectors of D channels.
    ///
    /// # Errors
    /// `InvalidArgument` where g is not 1, 2 or 4, C no multiple of g from g to D, or r none from g
    /// to C; for codes of four bits r is even.
    pub(super) fn check(&self, head_dim: usize) -> Result<(), OpError> {
        let Self { kept, group, channels, numbers } = *self;
        let invalid = OpErrorKind::InvalidArgument;
        ensure(matches!(group, 1 | 2 | 4), invalid, "group", || ("1, 2 or 4", group))?;
        let step = if numbers == KeptNumbers::Int4 { group.max(2) } else { group };
        let sizes = [("channels", channels, group, head_dim), ("kept", kept, step, channels)];
        for (what, size, step, most) in sizes {
            let sound = size > 0 && size.is_multiple_of(step) && size <= most;
            ensure(sound, invalid, what, || {
                (format!("a multiple of {step} from {step} to {most}"), size)
            })?;
        }
        Ok(())
    }

    /// Groups that a bitmap has bits for.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.channels / self.group
    }

    /// Groups that are kept of a vector.
    #[must_use]
    pub fn kept_groups(&self) -> usize {
        self.kept / self.group
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first half of a page, and of a basis.
    Keys,
    /// The second half.
    Values,
}

/// Where everything lies in a top-r page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopRPage {
    of: TopR,
    scales: ScaleDtype,
    page_tokens: usize,
}

/// Where the parts of one vector lie in its page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VectorPlace {
    /// Its bitmap.
    pub bitmap: Range<usize>,
    /// Its numbers.
    pub numbers: Range<usize>,
    /// Its scale; empty where there is none.
    pub scale: Range<usize>,
}

impl TopRPage {
    /// Of pages that a format was checked for.
    pub(super) fn new(of: TopR, scales: ScaleDtype, page_tokens: usize) -> Self {
        Self { of, scales, page_tokens }
    }

    /// What is kept.
    #[must_use]
    pub fn of(&self) -> TopR {
        self.of
    }

    /// Bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        2 * self.side_bytes()
    }

    fn side_bytes(&self) -> usize {
        let [bitmap, numbers, scale] = self.vector_bytes();
        self.page_tokens * (bitmap + numbers + scale)
    }

    fn vector_bytes(&self) -> [usize; 3] {
        let numbers = self.of.numbers;
        [self.of.groups().div_ceil(8), self.of.kept * numbers.bits() / 8, numbers.scale_bytes()]
    }

    /// The parts of a token's key or value.
    #[must_use]
    pub fn place(&self, side: Side, token: usize) -> VectorPlace {
        let mut start = if side == Side::Keys { 0 } else { self.side_bytes() };
        let [bitmap, numbers, scale] = self.vector_bytes().map(|bytes| {
            let first = start + token * bytes;
            start += self.page_tokens * bytes;
            first..first + bytes
        });
        VectorPlace { bitmap, numbers, scale }
    }

    /// The scale, as stored, of a vector whose largest kept number is so large: 0 where none is
    /// needed, NaN where `largest` is not finite or beyond what is stored.
    #[must_use]
    pub fn scale(&self, largest: f32) -> u16 {
        match self.of.numbers {
            KeptNumbers::Bf16 => {
                let held = bf16::from_f32(largest).is_finite();
                if held { 0 } else { self.scales.nan() }
            }
            KeptNumbers::Fp8 => self.scales.scale_of(largest, FP8_REACH),
            KeptNumbers::Int4 => self.scales.scale_of(largest, INT4_REACH),
        }
    }

    /// A stored scale as a number: 1 where there is none.
    #[must_use]
    pub fn wide_scale(&self, stored: &[u8]) -> f32 {
        match *stored {
            [low, high] => self.scales.widen(u16::from_le_bytes([low, high])),
            _ => 1.0,
        }
    }

    /// Stores kept number i of a vector into the zeros of its `numbers`; of a vector whose scale
    /// is NaN bf16 numbers are NaN, and codes 0.
    pub fn put(&self, numbers: &mut [u8], i: usize, x: f32, scale: f32) {
        match self.of.numbers {
            KeptNumbers::Bf16 => {
                let rounded = if scale.is_nan() { bf16::NAN } else { bf16::from_f32(x) };
                numbers[2 * i..2 * i + 2].copy_from_slice(&rounded.to_bits().to_le_bytes());
            }
            KeptNumbers::Fp8 if scale > 0.0 => {
                numbers[i] = Fp8E4m3::from_f32(x / scale).to_bits();
            }
            KeptNumbers::Int4 if scale > 0.0 => {
                let code = (x / scale + INT4_REACH).round_ties_even().clamp(0.0, 15.0) as u8;
                numbers[i / 2] |= code << (4 * (i % 2));
            }
            KeptNumbers::Fp8 | KeptNumbers::Int4 => {}
        }
    }

    /// What kept number i of a vector stands for.
    #[must_use]
    pub fn number(&self, numbers: &[u8], i: usize, scale: f32) -> f32 {
        match self.of.numbers {
            KeptNumbers::Bf16 => {
                bf16::from_bits(u16::from_le_bytes([numbers[2 * i], numbers[2 * i + 1]])).to_f32()
            }
            KeptNumbers::Fp8 => scale * Fp8E4m3::from_bits(numbers[i]).to_f32(),
            KeptNumbers::Int4 => {
                scale * (f32::from(numbers[i / 2] >> (4 * (i % 2)) & 15) - INT4_REACH)
            }
        }
    }

    /// What the kept numbers of a vector stand for, into `out` [r]: `number` of each.
    pub fn read_numbers(&self, numbers: &[u8], scale: f32, out: &mut [f32]) {
        match self.of.numbers {
            KeptNumbers::Bf16 => {
                for (out, &bits) in out.iter_mut().zip(numbers.as_chunks::<2>().0) {
                    *out = bf16::from_bits(u16::from_le_bytes(bits)).to_f32();
                }
            }
            KeptNumbers::Fp8 => {
                for (out, &bits) in out.iter_mut().zip(numbers) {
                    *out = scale * Fp8E4m3::from_bits(bits).to_f32();
                }
            }
            KeptNumbers::Int4 => {
                for (out, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                    *out =
                        [byte & 15, byte >> 4].map(|code| scale * (f32::from(code) - INT4_REACH));
                }
            }
        }
    }

    /// The groups that a bitmap names, in their order. Bits behind the last group or beyond as
    /// many as are kept count for nothing, whatever the bytes are.
    pub fn kept_groups<'a>(&self, bitmap: &'a [u8]) -> impl Iterator<Item = usize> + use<'a> {
        (0..self.of.groups())
            .filter(move |group| bitmap[group / 8] >> (group % 8) & 1 == 1)
            .take(self.of.kept_groups())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [KeptNumbers; 3] = [KeptNumbers::Bf16, KeptNumbers::Fp8, KeptNumbers::Int4];

    fn page(numbers: KeptNumbers, group: usize) -> TopRPage {
        let of = TopR { kept: 16, group, channels: 56, numbers };
        TopRPage::new(of, ScaleDtype::Bf16, 16)
    }

    #[test]
    fn every_part_of_every_vector_has_bytes_of_its_own() {
        for numbers in NUMBERS {
            for group in [1, 2, 4] {
                let page = page(numbers, group);
                let mut taken = vec![0u8; page.page_bytes()];
                for side in [Side::Keys, Side::Values] {
                    for token in 0..16 {
                        let VectorPlace { bitmap, numbers, scale } = page.place(side, token);
                        for part in [bitmap, numbers, scale] {
                            taken[part].iter_mut().for_each(|byte| *byte += 1);
                        }
                    }
                }
                assert!(taken.iter().all(|&times| times == 1));
                assert!(page.page_bytes().is_multiple_of(16));
            }
        }
    }

    #[test]
    fn a_number_is_half_a_step_away_at_most() {
        for (numbers, step) in [
            (KeptNumbers::Bf16, 2f32.powi(-8)),
            (KeptNumbers::Fp8, 2f32.powi(-4)),
            (KeptNumbers::Int4, 0.5 / 7.5 * 1.01),
        ] {
            let page = page(numbers, 1);
            for largest in [1e-30f32, 0.7, 3.0, 1e30] {
                let stored = page.scale(largest).to_le_bytes();
                let stored = if numbers == KeptNumbers::Bf16 { &[] } else { &stored[..] };
                let scale = page.wide_scale(stored);
                for i in 0..=200u8 {
                    let x = largest * (f32::from(i) / 100.0 - 1.0);
                    let mut bytes = [0; 2];
                    page.put(&mut bytes, 0, x, scale);
                    let back = page.number(&bytes, 0, scale);
                    let size = if numbers == KeptNumbers::Int4 { largest } else { x.abs() };
                    assert!((x - back).abs() <= step * size + largest * 2e-5, "{x} {back}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_nan() {
        for numbers in NUMBERS {
            let page = page(numbers, 1);
            for largest in [f32::NAN, f32::INFINITY, f32::MAX] {
                let scale = page.scales.widen(page.scale(largest));
                if largest == f32::MAX && numbers != KeptNumbers::Bf16 {
                    assert!(scale.is_finite());
                    continue;
                }
                assert!(scale.is_nan());
                let mut bytes = [0; 2];
                page.put(&mut bytes, 0, 1.0, scale);
                assert!(page.number(&bytes, 0, scale).is_nan());
            }
        }
    }

    #[test]
    fn bitmaps_of_any_bytes_name_no_more_than_is_kept() {
        let page = page(KeptNumbers::Bf16, 2);
        let groups: Vec<usize> = page.kept_groups(&[0xFF; 4]).collect();
        assert_eq!(groups, [0, 1, 2, 3, 4, 5, 6, 7]);
        let groups: Vec<usize> = page.kept_groups(&[0, 0, 0, 0xF8]).collect();
        assert_eq!(groups, [27], "28 groups have bits");
    }
}
