//! Exact pages into packed ones and back, a page a task.

use kvweave_core::ops::{
    Element, OpError, Pack, PackPages, PackedFormat, Packs, ScaleDtype, Step, UnpackPages, WideStep,
};
use rayon::prelude::*;

use crate::disjoint::Disjoint;
use crate::packed_page::{PackedKeys, PackedPage, PackedValues};
use crate::simd::dispatch;

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
        || (room(), room()),
        |(keys, values), &(pack, page)| {
            load(cache, &packs, (pack, page), keys, values);
            // SAFETY: packed blocks share no page, as `validate` proved, and each page of each has
            // one task.
            let target = unsafe { packed.piece((pack.block + page) * bytes, bytes) };
            let held = pack.tokens * dim;
            target.fill(0);
            pack_keys(&format, &keys[..held], target);
            pack_values(&format, &values[..held], target);
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
    let UnpackPages { cache, packed, packs } = params;
    let (format, geometry) = (packs.format, packs.geometry());
    let (bytes, dim) = (format.page_bytes(), format.head_dim());
    let cache = Disjoint::new(cache);
    let room = || vec![0.0f32; format.page_tokens() * dim];
    tasks_of(&packs).par_iter().for_each_init(
        || (room(), room()),
        |(keys, values), &(pack, page)| {
            let source = &packed[(pack.block + page) * bytes..][..bytes];
            let held = pack.tokens * dim;
            let slots = 0..pack.tokens;
            let of_page = PackedPage::new(&format, source);
            dispatch(PackedKeys { page: of_page, slots: slots.clone(), rows: &mut keys[..held] });
            dispatch(PackedValues { page: of_page, slots, rows: &mut values[..held], width: dim });
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
fn load<C: Element>(
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

fn pack_keys(format: &PackedFormat, keys: &[f32], page: &mut [u8]) {
    let dim = format.head_dim();
    let mut spreads = vec![Spread::NOTHING; dim];
    for row in keys.chunks_exact(dim) {
        for (spread, &key) in spreads.iter_mut().zip(row) {
            spread.take_in(key);
        }
    }
    let (scales, largest) = (format.scales(), format.kind().largest_code());
    let steps: Vec<WideStep> = spreads
        .iter()
        .enumerate()
        .map(|(channel, spread)| {
            let places = (format.key_scale(channel), format.key_zero(channel));
            put(page, places, spread.step(largest, scales)).widen(scales)
        })
        .collect();
    for (row, codes) in keys.chunks_exact(dim).zip(page.chunks_exact_mut(dim / 2)) {
        for ((keys, steps), codes) in row
            .as_chunks::<8>()
            .0
            .iter()
            .zip(steps.as_chunks::<8>().0)
            .zip(codes.as_chunks_mut::<4>().0)
        {
            let mut word = 0;
            for channel in 0..8 {
                let code = steps[channel].code(keys[channel], largest);
                word |= u32::from(code) << (4 * (channel / 2) + 16 * (channel % 2));
            }
            *codes = word.to_le_bytes();
        }
    }
}

fn pack_values(format: &PackedFormat, values: &[f32], page: &mut [u8]) {
    let (scales, largest) = (format.scales(), format.kind().largest_code());
    for (token, row) in values.chunks_exact(format.head_dim()).enumerate() {
        let mut spread = Spread::NOTHING;
        for &value in row {
            spread.take_in(value);
        }
        let places = (format.value_scale(token), format.value_zero(token));
        let step = put(page, places, spread.step(largest, scales)).widen(scales);
        for (channel, &value) in row.iter().enumerate() {
            let place = format.value_code(token, channel);
            page[place.byte] |= step.code(value, largest) << place.shift;
        }
    }
}

/// Least and greatest of some numbers, and whether all are finite.
#[derive(Clone, Copy)]
struct Spread {
    least: f32,
    greatest: f32,
    /// 0, or NaN.
    odd: f32,
}

impl Spread {
    const NOTHING: Self = Self { least: f32::INFINITY, greatest: f32::NEG_INFINITY, odd: 0.0 };

    #[inline]
    fn take_in(&mut self, x: f32) {
        self.least = if x < self.least { x } else { self.least };
        self.greatest = if x > self.greatest { x } else { self.greatest };
        // NaN of what is NaN or infinite.
        self.odd += x * 0.0;
    }

    fn step(&self, largest_code: u8, scales: ScaleDtype) -> Step {
        Step::of(self.least + self.odd, self.greatest, largest_code, scales)
    }
}

fn put(page: &mut [u8], (scale, zero): (usize, usize), step: Step) -> Step {
    page[scale..scale + 2].copy_from_slice(&step.scale.to_le_bytes());
    page[zero..zero + 2].copy_from_slice(&step.zero.to_le_bytes());
    step
}
