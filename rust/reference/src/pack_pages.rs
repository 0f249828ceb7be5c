//! Exact pages into packed ones, and back.

use kvweave_core::ops::{
    Bases, CodePlace, Element, OpError, PackPages, PackedFormat, ScaleDtype, Side, Step,
    UnpackPages, WideStep,
};

use crate::{planes, top_r};

/// See [`PackPages`].
///
/// # Errors
/// What [`PackPages::validate`] refuses.
pub fn pack_pages<C: Element>(params: PackPages<'_, C>) -> Result<(), OpError> {
    params.validate()?;
    let PackPages { cache, packed, packs } = params;
    let (format, geometry) = (packs.format, packs.geometry());
    let bytes = format.page_bytes();
    for pack in packs.iter() {
        for page in 0..packs.pages {
            let first = |token: usize| {
                let block = pack.sources[token / packs.page_tokens] as usize;
                geometry.key_offset(block, 0, page, token % packs.page_tokens)
            };
            let key = |token: usize, channel: usize| cache[first(token) + channel].to_f32();
            let value = |token: usize, channel: usize| {
                cache[first(token) + geometry.value_offset + channel].to_f32()
            };
            let target = &mut packed[(pack.block + page) * bytes..][..bytes];
            let at = (pack.block, page);
            pack_page(&format, packs.bases, at, (pack.tokens, key, value), target);
        }
    }
    Ok(())
}

/// Packs so many tokens' numbers, by token and channel, into a page of a block.
pub(crate) fn pack_page(
    format: &PackedFormat,
    bases: Option<Bases<'_>>,
    (block, rank): (usize, usize),
    (tokens, key, value): (usize, impl Fn(usize, usize) -> f32, impl Fn(usize, usize) -> f32),
    page: &mut [u8],
) {
    page.fill(0);
    let Some(bases) = bases else {
        pack_keys(format, tokens, key, page);
        pack_values(format, tokens, value, page);
        return;
    };
    for token in 0..tokens {
        let at = (block, rank, token);
        let key: Vec<f32> = (0..format.head_dim()).map(|c| key(token, c)).collect();
        pack_vector(format, &bases, at, (Side::Keys, &key), page);
        let value: Vec<f32> = (0..format.head_dim()).map(|c| value(token, c)).collect();
        pack_vector(format, &bases, at, (Side::Values, &value), page);
    }
}

/// See [`UnpackPages`].
///
/// # Errors
/// What [`UnpackPages::validate`] refuses.
pub fn unpack_pages<C: Element>(params: UnpackPages<'_, C>) -> Result<(), OpError> {
    params.validate()?;
    let UnpackPages { cache, packed, packs, in_basis } = params;
    let geometry = packs.geometry();
    let bytes = packs.format.page_bytes();
    for pack in packs.iter() {
        for page in 0..packs.pages {
            let source = &packed[(pack.block + page) * bytes..][..bytes];
            let at = (pack.block, page);
            let [keys, values] = match packs.bases {
                Some(bases) if in_basis => numbers_of(&packs.format, bases, at, source),
                bases => stands_for(&packs.format, bases, at, source),
            };
            for token in 0..pack.tokens {
                let block = pack.sources[token / packs.page_tokens] as usize;
                let first = geometry.key_offset(block, 0, page, token % packs.page_tokens);
                let dim = packs.format.head_dim();
                for channel in 0..dim {
                    let (at, from) = (first + channel, token * dim + channel);
                    cache[at] = C::from_f32(keys[from]);
                    cache[at + geometry.value_offset] = C::from_f32(values[from]);
                }
            }
        }
    }
    Ok(())
}

/// What a packed page stands for: keys [P, D] and values [P, D].
pub(crate) fn stands_for(
    format: &PackedFormat,
    bases: Option<Bases<'_>>,
    (block, rank): (usize, usize),
    page: &[u8],
) -> [Vec<f32>; 2] {
    let (tokens, dim) = (format.page_tokens(), format.head_dim());
    if let Some(bases) = bases {
        return [Side::Keys, Side::Values].map(|side| {
            let vector = |token| unpack_vector(format, &bases, (block, rank, token), side, page);
            (0..tokens).flat_map(vector).collect()
        });
    }
    [packed_key, packed_value].map(|packed| {
        let at = |i: usize| packed(format, page, i / dim, i % dim);
        (0..tokens * dim).map(at).collect()
    })
}

/// The numbers of a packed page along the directions of its bases: keys [P, D] and values [P, D].
fn numbers_of(
    format: &PackedFormat,
    bases: Bases<'_>,
    (block, rank): (usize, usize),
    page: &[u8],
) -> [Vec<f32>; 2] {
    [Side::Keys, Side::Values].map(|side| {
        let vector = |token| match format.top_r() {
            Some(of) => top_r::numbers_of(&of, format.head_dim(), (side, token), page),
            None => planes::numbers_of(bases.planes(format, block, rank, side), token, page),
        };
        (0..format.page_tokens()).flat_map(vector).collect()
    })
}

/// Packs a vector of a block's page and token in its basis, into a page of zeros.
fn pack_vector(
    format: &PackedFormat,
    bases: &Bases<'_>,
    (block, rank, token): (usize, usize, usize),
    (side, x): (Side, &[f32]),
    page: &mut [u8],
) {
    if let Some(of) = format.top_r() {
        let basis = bases.basis(format, block, rank, side);
        top_r::pack_vector(&of, basis, (side, token), x, page);
    } else {
        planes::pack_vector(bases.planes(format, block, rank, side), token, x, page);
    }
}

/// What a packed vector stands for, [D].
fn unpack_vector(
    format: &PackedFormat,
    bases: &Bases<'_>,
    (block, rank, token): (usize, usize, usize),
    side: Side,
    page: &[u8],
) -> Vec<f32> {
    match format.top_r() {
        Some(of) => {
            let basis = bases.basis(format, block, rank, side);
            top_r::unpack_vector(&of, basis, (side, token), page)
        }
        None => planes::unpack_vector(bases.planes(format, block, rank, side), token, page),
    }
}

/// What the code of a key stands for.
fn packed_key(format: &PackedFormat, page: &[u8], token: usize, channel: usize) -> f32 {
    let places = (format.key_scale(channel), format.key_zero(channel));
    let code = code_at(format, page, format.key_code(token, channel));
    step_at(page, places, format.scales()).number(code)
}

/// What the code of a value stands for.
fn packed_value(format: &PackedFormat, page: &[u8], token: usize, channel: usize) -> f32 {
    let places = (format.value_scale(token), format.value_zero(token));
    let code = code_at(format, page, format.value_code(token, channel));
    step_at(page, places, format.scales()).number(code)
}

fn pack_keys(
    format: &PackedFormat,
    tokens: usize,
    key: impl Fn(usize, usize) -> f32,
    page: &mut [u8],
) {
    for channel in 0..format.head_dim() {
        let step = step_of(format, (0..tokens).map(|token| key(token, channel)));
        put(page, format.key_scale(channel), step.scale);
        put(page, format.key_zero(channel), step.zero);
        let step = step.widen(format.scales());
        for token in 0..tokens {
            let code = step.code(key(token, channel), format.largest_code());
            let CodePlace { byte, shift } = format.key_code(token, channel);
            page[byte] |= code << shift;
        }
    }
}

fn pack_values(
    format: &PackedFormat,
    tokens: usize,
    value: impl Fn(usize, usize) -> f32,
    page: &mut [u8],
) {
    for token in 0..tokens {
        let step = step_of(format, (0..format.head_dim()).map(|channel| value(token, channel)));
        put(page, format.value_scale(token), step.scale);
        put(page, format.value_zero(token), step.zero);
        let step = step.widen(format.scales());
        for channel in 0..format.head_dim() {
            let code = step.code(value(token, channel), format.largest_code());
            let CodePlace { byte, shift } = format.value_code(token, channel);
            page[byte] |= code << shift;
        }
    }
}

/// Steps from the least to the greatest of some numbers.
fn step_of(format: &PackedFormat, numbers: impl Iterator<Item = f32> + Clone) -> Step {
    let finite = numbers.clone().all(f32::is_finite);
    let least = numbers.clone().fold(f32::INFINITY, f32::min);
    let greatest = numbers.fold(f32::NEG_INFINITY, f32::max);
    let least = if finite { least } else { f32::NAN };
    Step::of(least, greatest, format.largest_code(), format.scales())
}

fn put(page: &mut [u8], at: usize, bits: u16) {
    page[at..at + 2].copy_from_slice(&bits.to_le_bytes());
}

fn step_at(page: &[u8], (scale, zero): (usize, usize), scales: ScaleDtype) -> WideStep {
    let bits = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
    Step { scale: bits(scale), zero: bits(zero) }.widen(scales)
}

fn code_at(format: &PackedFormat, page: &[u8], CodePlace { byte, shift }: CodePlace) -> u8 {
    page[byte] >> shift & format.largest_code()
}
