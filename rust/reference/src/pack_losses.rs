//! What exact pages lose by being packed.

use kvweave_core::ops::{Element, OpError, PackLosses};

use crate::pack_pages::{pack_page, stands_for};

/// See [`PackLosses`].
///
/// # Errors
/// What [`PackLosses::validate`] refuses.
pub fn pack_losses<C: Element>(params: PackLosses<'_, C>) -> Result<(), OpError> {
    params.validate()?;
    let (format, packs, count) = (params.packs.format, params.packs, params.ranks.len());
    let (geometry, dim, bytes) = (packs.geometry(), format.head_dim(), format.page_bytes());
    let bases = params.bases();
    let mut sums = vec![0.0; 4 * count];
    let mut pages = vec![0; packs.iter().count() * count * bytes];
    for ((row, pack), pages) in packs.iter().enumerate().zip(pages.chunks_exact_mut(count * bytes))
    {
        for (at, page) in pages.chunks_exact_mut(bytes).enumerate() {
            let first = |token: usize| {
                let block = pack.sources[token / packs.page_tokens] as usize;
                let rank = params.ranks[at] as usize;
                geometry.key_offset(block, 0, rank, token % packs.page_tokens)
            };
            let number = |token: usize, channel: usize| params.cache[first(token) + channel];
            let key = |token: usize, channel: usize| number(token, channel).to_f32();
            let value = |token, channel| number(token, geometry.value_offset + channel).to_f32();
            pack_page(&format, bases, (0, at), (pack.tokens, key, value), page);
            let [keys, values] = stands_for(&format, bases, (0, at), page);
            let error = |back: &[f32], token: usize, channel: usize, exact: f32| {
                let back = C::from_f32(back[token * dim + channel]).to_f32();
                f64::from(back) - f64::from(exact)
            };
            for token in if row == 0 { params.left_out } else { 0 }..pack.tokens {
                let of_key: Vec<f64> =
                    (0..dim).map(|c| error(&keys, token, c, key(token, c))).collect();
                for channel in 0..dim {
                    let lost = match params.roots {
                        Some(roots) => {
                            let root = |c: usize| roots[(at * dim + c) * dim + channel];
                            (0..dim).map(|c| of_key[c] * root(c)).sum()
                        }
                        None => of_key[channel],
                    };
                    let of_value = error(&values, token, channel, value(token, channel));
                    sums[2 * at] += lost * lost;
                    sums[2 * at + 1] += of_value * of_value;
                    sums[2 * (count + at)] += f64::from(key(token, channel)).powi(2);
                    sums[2 * (count + at) + 1] += f64::from(value(token, channel)).powi(2);
                }
            }
        }
    }
    params.sums.copy_from_slice(&sums);
    if let Some(packed) = params.packed {
        packed.copy_from_slice(&pages);
    }
    Ok(())
}
