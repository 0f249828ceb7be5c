//! Exact pages into packed ones, and back.

use kvweave_core::ops::{
    CodePlace, Element, OpError, PackPages, PackedFormat, ScaleDtype, Step, UnpackPages, WideStep,
};

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
            target.fill(0);
            pack_keys(&format, pack.tokens, key, target);
            pack_values(&format, pack.tokens, value, target);
        }
    }
    Ok(())
}

/// See [`UnpackPages`].
///
/// # Errors
/// What [`UnpackPages::validate`] refuses.
pub fn unpack_pages<C: Element>(params: UnpackPages<'_, C>) -> Result<(), OpError> {
    params.validate()?;
    let UnpackPages { cache, packed, packs } = params;
    let geometry = packs.geometry();
    let bytes = packs.format.page_bytes();
    for pack in packs.iter() {
        for page in 0..packs.pages {
            let source = &packed[(pack.block + page) * bytes..][..bytes];
            for token in 0..pack.tokens {
                let block = pack.sources[token / packs.page_tokens] as usize;
                let first = geometry.key_offset(block, 0, page, token % packs.page_tokens);
                for channel in 0..packs.format.head_dim() {
                    let at = first + channel;
                    cache[at] = C::from_f32(packed_key(&packs.format, source, token, channel));
                    cache[at + geometry.value_offset] =
                        C::from_f32(packed_value(&packs.format, source, token, channel));
                }
            }
        }
    }
    Ok(())
}

/// What the code of a key stands for.
pub(crate) fn packed_key(format: &PackedFormat, page: &[u8], token: usize, channel: usize) -> f32 {
    let places = (format.key_scale(channel), format.key_zero(channel));
    step_at(page, places, format.scales()).number(code_at(page, format.key_code(token, channel)))
}

/// What the code of a value stands for.
pub(crate) fn packed_value(
    format: &PackedFormat,
    page: &[u8],
    token: usize,
    channel: usize,
) -> f32 {
    let places = (format.value_scale(token), format.value_zero(token));
    step_at(page, places, format.scales()).number(code_at(page, format.value_code(token, channel)))
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
            let code = step.code(key(token, channel), format.kind().largest_code());
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
            let code = step.code(value(token, channel), format.kind().largest_code());
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
    Step::of(least, greatest, format.kind().largest_code(), format.scales())
}

fn put(page: &mut [u8], at: usize, bits: u16) {
    page[at..at + 2].copy_from_slice(&bits.to_le_bytes());
}

fn step_at(page: &[u8], (scale, zero): (usize, usize), scales: ScaleDtype) -> WideStep {
    let bits = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
    Step { scale: bits(scale), zero: bits(zero) }.widen(scales)
}

fn code_at(page: &[u8], CodePlace { byte, shift }: CodePlace) -> u8 {
    page[byte] >> shift & 15
}
