//! Exact pages into packed ones and back, a page a task.

use std::array;

use kvweave_core::ops::{
    Bases, Element, OpError, Pack, PackPages, PackedFormat, Packs, Side, Step, UnpackPages,
    WideStep,
};
use rayon::prelude::*;

use crate::basis_numbers::BasisNumbers;
use crate::disjoint::Disjoint;
use crate::packed_page::{
    KEY_SHIFTS, PackedKeys, PackedPage, PackedValues, UNIT, VALUE_SHIFTS, tokens_of, words_of,
};
use crate::simd::{Kernel, Vector, dispatch};
use crate::{planes_page, top_r_page};

/// Numbers that are worked on together: those of a word.
const LANES: usize = 8;

/// See [`PackPages`].
///
/// # Errors
/// What [`PackPages::validate`] refuses.
pub fn pack_pages<C: Element>(params: PackPages<'_, C>) -> Result<(), OpError> {
    params.validate()?;
    let PackPages { cache, packed, packs } = params;
    let format = packs.format;
    let (bytes, dim) = (format.page_bytes(), format.head_dim());
    let packed = Disjoint::new(packed);
    let room = || vec![0.0f32; format.page_tokens() * dim];
    tasks_of(&packs).par_iter().for_each_init(
        || (room(), room(), BasisPacker::default()),
        |(keys, values, packer), &(pack, page)| {
            load(cache, &packs, (pack, page), keys, values);
            // SAFETY: packed blocks share no page, as `validate` proved, and each page of each has
            // one task.
            let target = unsafe { packed.piece((pack.block + page) * bytes, bytes) };
            let held = pack.tokens * dim;
            let at = (&format, packs.bases, (pack.block, page));
            pack_page(at, [&keys[..held], &values[..held]], packer, target);
        },
    );
    Ok(())
}

/// See [`UnpackPages`].
///
/// # Errors
/// What [`UnpackPages::validate`] refuses.
pub fn unpack_pages<C: Element>(params: UnpackPages<'_, C>) -> Result<(), OpError> {
    params.validate()?;
    let UnpackPages { cache, packed, packs, in_basis } = params;
    let (format, geometry) = (packs.format, packs.geometry());
    let (bytes, dim) = (format.page_bytes(), format.head_dim());
    let cache = Disjoint::new(cache);
    let room = || vec![0.0f32; format.page_tokens() * dim];
    tasks_of(&packs).par_iter().for_each_init(
        || (room(), room()),
        |(keys, values), &(pack, page)| {
            let source = &packed[(pack.block + page) * bytes..][..bytes];
            let held = pack.tokens * dim;
            let (of_keys, of_values) = (&mut keys[..held], &mut values[..held]);
            match packs.bases {
                Some(bases) if in_basis => {
                    let at = (&format, pack.block, page);
                    numbers_in_basis(&bases, at, Side::Keys, source, of_keys);
                    numbers_in_basis(&bases, at, Side::Values, source, of_values);
                }
                bases => {
                    unpack_page((&format, bases, (pack.block, page)), source, [of_keys, of_values]);
                }
            }
            for (first, tokens, block) in parts_of(&packs, pack) {
                let (from, len) = (first * dim, tokens * dim);
                let at = geometry.key_offset(block, 0, page, 0);
                // SAFETY: blocks of the cache share no page, as `validate` proved, and each page of
                // each has one task; its keys and values lie apart.
                let (of_keys, of_values) =
                    unsafe { (cache.piece(at, len), cache.piece(at + geometry.value_offset, len)) };
                C::narrow(&keys[from..from + len], of_keys);
                C::narrow(&values[from..from + len], of_values);
            }
        },
    );
    Ok(())
}

/// A page of a block, and the bases that it may be packed in.
pub(crate) type PageOf<'a> = (&'a PackedFormat, Option<Bases<'a>>, (usize, usize));

/// Packs keys and values [tokens, D] into a page.
pub(crate) fn pack_page(
    (format, bases, (block, page)): PageOf<'_>,
    [keys, values]: [&[f32]; 2],
    packer: &mut BasisPacker,
    bytes: &mut [u8],
) {
    bytes.fill(0);
    let Some(bases) = bases else {
        dispatch(PackKeys { format, keys, page: &mut *bytes });
        dispatch(PackValues { format, values, page: bytes });
        return;
    };
    packer.pack(&bases, (format, block, page), (Side::Keys, keys), bytes);
    packer.pack(&bases, (format, block, page), (Side::Values, values), bytes);
}

/// What a page stands for, into keys and values [tokens, D].
pub(crate) fn unpack_page(
    (format, bases, (block, page)): PageOf<'_>,
    bytes: &[u8],
    [keys, values]: [&mut [f32]; 2],
) {
    let dim = format.head_dim();
    let Some(bases) = bases else {
        let (page, slots) = (PackedPage::new(format, bytes), 0..keys.len() / dim);
        dispatch(PackedKeys { page, slots: slots.clone(), rows: keys });
        dispatch(PackedValues { page, slots, rows: values, width: dim });
        return;
    };
    unpack_in_basis(&bases, (format, block, page), Side::Keys, bytes, keys);
    unpack_in_basis(&bases, (format, block, page), Side::Values, bytes, values);
}

/// Packs vectors in bases; room that this takes is used again for every page of a task.
#[derive(Default)]
pub(crate) struct BasisPacker {
    top_r: top_r_page::Packer,
    measures: BasisNumbers,
}

impl BasisPacker {
    /// Packs rows [tokens, D] of one side of a block's page, into a page of zeros.
    fn pack(
        &mut self,
        bases: &Bases<'_>,
        (format, block, page): (&PackedFormat, usize, usize),
        (side, rows): (Side, &[f32]),
        bytes: &mut [u8],
    ) {
        if let Some(of) = format.top_r() {
            let basis = bases.basis(format, block, page, side);
            self.top_r.pack(&of, basis, side, rows, bytes);
        } else {
            let basis = bases.planes(format, block, page, side);
            planes_page::pack(&basis, rows, &mut self.measures, bytes);
        }
    }
}

/// What the tokens of a block's page stand for on one side, into rows [tokens, D].
fn unpack_in_basis(
    bases: &Bases<'_>,
    (format, block, page): (&PackedFormat, usize, usize),
    side: Side,
    bytes: &[u8],
    rows: &mut [f32],
) {
    if let Some(of) = format.top_r() {
        top_r_page::unpack(&of, bases.basis(format, block, page, side), side, bytes, rows);
    } else {
        planes_page::unpack(&bases.planes(format, block, page, side), bytes, rows);
    }
}

/// Their numbers along the directions of the basis, into rows [tokens, D].
fn numbers_in_basis(
    bases: &Bases<'_>,
    (format, block, page): (&PackedFormat, usize, usize),
    side: Side,
    bytes: &[u8],
    rows: &mut [f32],
) {
    let dim = format.head_dim();
    if let Some(of) = format.top_r() {
        top_r_page::numbers(&of, dim, side, bytes, rows);
    } else {
        planes_page::numbers(&bases.planes(format, block, page, side).place, dim, bytes, rows);
    }
}

/// The pages to pack or unpack, one by one.
fn tasks_of<'a>(packs: &'a Packs<'_>) -> Vec<(Pack<'a>, usize)> {
    packs.iter().flat_map(|pack| (0..packs.pages).map(move |page| (pack, page))).collect()
}

/// The blocks of a row: first token, tokens, number.
fn parts_of<'a>(
    packs: &'a Packs<'_>,
    pack: Pack<'a>,
) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
    pack.sources.iter().enumerate().map(move |(i, &block)| {
        let first = i * packs.page_tokens;
        (first, packs.page_tokens.min(pack.tokens - first), block as usize)
    })
}

/// Keys and values of a page's tokens, widened.
pub(crate) fn load<C: Element>(
    cache: &[C],
    packs: &Packs<'_>,
    (pack, page): (Pack<'_>, usize),
    keys: &mut [f32],
    values: &mut [f32],
) {
    let (geometry, dim) = (packs.geometry(), packs.format.head_dim());
    for (first, tokens, block) in parts_of(packs, pack) {
        let (from, len) = (first * dim, tokens * dim);
        let at = geometry.key_offset(block, 0, page, 0);
        C::widen(&cache[at..at + len], &mut keys[from..from + len]);
        let at = at + geometry.value_offset;
        C::widen(&cache[at..at + len], &mut values[from..from + len]);
    }
}

/// Steps and codes of a page's keys [tokens, D], into a page of zeros.
struct PackKeys<'a> {
    format: &'a PackedFormat,
    keys: &'a [f32],
    page: &'a mut [u8],
}

impl Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { format, keys, page } = self;
        let dim = format.head_dim();
        let mut spreads = vec![Spread::NOTHING; dim / LANES];
        for row in keys.chunks_exact(dim) {
            for (spread, keys) in spreads.iter_mut().zip(row.as_chunks().0) {
                spread.take_in(keys);
            }
        }
        let mut steps = vec![([0.0; LANES], [0.0; LANES]); dim / LANES];
        for (channel, step) in spreads.iter().flat_map(|spread| spread.steps(format)).enumerate() {
            let wide =
                put(page, format, (format.key_scale(channel), format.key_zero(channel)), step);
            let (scales, zeros) = &mut steps[channel / LANES];
            (scales[channel % LANES], zeros[channel % LANES]) = (wide.scale, wide.zero);
        }
        let largest = f32::from(format.largest_code());
        if format.code_bits() == 8 {
            for (row, codes) in keys.chunks_exact(dim).zip(page.chunks_exact_mut(dim)) {
                let eights = codes.as_chunks_mut().0.iter_mut().zip(row.as_chunks().0);
                for ((codes, keys), (scales, zeros)) in eights.zip(&steps) {
                    *codes = codes_of(keys, scales, zeros, largest).map(|code| code as u8);
                }
            }
            return;
        }
        for (row, codes) in keys.chunks_exact(dim).zip(page.chunks_exact_mut(dim / 2)) {
            let words = codes.as_chunks_mut::<4>().0.iter_mut();
            for ((keys, word), (scales, zeros)) in row.as_chunks().0.iter().zip(words).zip(&steps) {
                let codes = codes_of(keys, scales, zeros, largest);
                let placed: [u32; LANES] = array::from_fn(|c| codes[c] << KEY_SHIFTS[c]);
                *word = placed.iter().fold(0, |word, code| word | code).to_le_bytes();
            }
        }
    }
}

/// The same of its values.
struct PackValues<'a> {
    format: &'a PackedFormat,
    values: &'a [f32],
    page: &'a mut [u8],
}

impl Kernel for PackValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { format, values, page } = self;
        let dim = format.head_dim();
        let largest = f32::from(format.largest_code());
        let mut codes = vec![[0u32; LANES]; UNIT * dim / LANES];
        for (unit, values) in values.chunks(UNIT * dim).enumerate() {
            codes.fill([0; LANES]);
            for (row, values) in values.chunks_exact(dim).enumerate() {
                let token = UNIT * unit + row;
                let mut spread = Spread::NOTHING;
                for values in values.as_chunks().0 {
                    spread.take_in(values);
                }
                let places = (format.value_scale(token), format.value_zero(token));
                let WideStep { scale, zero } = put(page, format, places, spread.step(format));
                let of_row = &mut codes[row * dim / LANES..][..dim / LANES];
                for (codes, values) in of_row.iter_mut().zip(values.as_chunks().0) {
                    *codes = codes_of(values, &[scale; LANES], &[zero; LANES], largest);
                }
            }
            if format.code_bits() == 8 {
                let rows = &mut page[format.value_codes()][unit * UNIT * dim..][..values.len()];
                for (row, codes) in rows.as_chunks_mut().0.iter_mut().zip(&codes) {
                    *row = codes.map(|code| code as u8);
                }
                continue;
            }
            let words = &mut page[format.value_codes()].as_chunks_mut::<4>().0[unit * 2 * dim..];
            for tile in 0..dim / UNIT {
                for lane in 0..UNIT / 4 {
                    let mut eight = [0u32; LANES];
                    for (place, row) in tokens_of(0, lane).into_iter().enumerate() {
                        let at = (row * dim + UNIT * tile) / LANES;
                        let (low, high, shift) = (codes[at], codes[at + 1], VALUE_SHIFTS[place]);
                        for c in 0..LANES {
                            eight[c] |= (low[c] | high[c] << 4) << shift;
                        }
                    }
                    for (at, word) in words_of(format, tile, lane).into_iter().zip(eight) {
                        words[at] = word.to_le_bytes();
                    }
                }
            }
        }
    }
}

/// The codes nearest to numbers, of two the even one; 0 where a scale is 0 or NaN.
#[inline(always)]
fn codes_of(
    numbers: &[f32; LANES],
    scales: &[f32; LANES],
    zeros: &[f32; LANES],
    largest: f32,
) -> [u32; LANES] {
    array::from_fn(|c| {
        // NaN is below nothing, so 0 takes its place.
        let steps = ((numbers[c] - zeros[c]) / scales[c]).max(0.0).min(largest);
        // Beside so large a number nothing is left of a fraction but its rounding.
        (steps + 12_582_912.0).to_bits() & 255
    })
}

/// Least and greatest of numbers, lane by lane, and whether all are finite.
#[derive(Clone, Copy)]
struct Spread {
    least: [f32; LANES],
    greatest: [f32; LANES],
    /// 0, or NaN.
    odd: [f32; LANES],
}

impl Spread {
    const NOTHING: Self = Self {
        least: [f32::INFINITY; LANES],
        greatest: [f32::NEG_INFINITY; LANES],
        odd: [0.0; LANES],
    };

    #[inline(always)]
    fn take_in(&mut self, numbers: &[f32; LANES]) {
        for (c, &x) in numbers.iter().enumerate() {
            self.least[c] = if x < self.least[c] { x } else { self.least[c] };
            self.greatest[c] = if x > self.greatest[c] { x } else { self.greatest[c] };
            // NaN of what is NaN or infinite.
            self.odd[c] += x * 0.0;
        }
    }

    /// Of each lane.
    fn steps(&self, format: &PackedFormat) -> [Step; LANES] {
        let (largest, scales) = (format.largest_code(), format.scales());
        array::from_fn(|c| Step::of(self.least[c] + self.odd[c], self.greatest[c], largest, scales))
    }

    /// Of all lanes together.
    fn step(&self, format: &PackedFormat) -> Step {
        let least = self.least.into_iter().fold(f32::INFINITY, f32::min);
        let greatest = self.greatest.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let odd: f32 = self.odd.iter().sum();
        Step::of(least + odd, greatest, format.largest_code(), format.scales())
    }
}

/// Writes a step, and has it to calculate with.
fn put(
    page: &mut [u8],
    format: &PackedFormat,
    (scale, zero): (usize, usize),
    step: Step,
) -> WideStep {
    page[scale..scale + 2].copy_from_slice(&step.scale.to_le_bytes());
    page[zero..zero + 2].copy_from_slice(&step.zero.to_le_bytes());
    step.widen(format.scales())
}
