//! New keys and values into pages, and bounds of pages.

use kvweave_core::ops::{Cached, Element, OpError, PageBounds, PageGeometry, WritePages};
use rayon::prelude::*;

use crate::disjoint::Disjoint;

/// Rows of one task: below this, threads cost more than they bring.
const CHUNK: usize = 64;

/// See [`WritePages`].
///
/// # Errors
/// What [`WritePages::validate`] refuses.
pub fn write_pages<T: Element, C: Cached<T>>(params: WritePages<'_, T, C>) -> Result<(), OpError> {
    params.validate()?;
    let places = params.write_slots();
    let WritePages { cache, geometry, layer, scales, keys, values, bounds, .. } = params;
    let dim = geometry.head_dim;
    let pages = Disjoint::new(cache);
    (0..keys.rows).into_par_iter().with_min_len(CHUNK).for_each(|row| {
        for head in 0..geometry.kv_heads {
            let Some(key) = places.key_offset(row, head) else { continue };
            // SAFETY: `validate` proved that different (row, head, key or value) share no element.
            C::store(keys.vector(row, head), scales.key, unsafe { pages.piece(key, dim) });
            let value = key + geometry.value_offset;
            // SAFETY: as for the key.
            C::store(values.vector(row, head), scales.value, unsafe { pages.piece(value, dim) });
        }
    });
    if let Some(bounds) = bounds {
        update_bounds(cache, &geometry, layer, scales.key, bounds);
    }
    Ok(())
}

fn update_bounds<C: Element>(
    cache: &[C],
    geometry: &PageGeometry,
    layer: usize,
    scale: f32,
    PageBounds { values, held, rows }: PageBounds<'_>,
) {
    let (dim, row) = (geometry.head_dim, PageBounds::row_len(geometry.head_dim));
    let values = Disjoint::new(values);
    held.par_iter().enumerate().for_each(|(i, &[block, begin, end])| {
        let block = block as usize;
        let (mut key, mut sums) = (vec![0.0; dim], vec![0.0; dim]);
        for head in 0..geometry.kv_heads {
            let first = PageBounds::first_row(held, rows, i);
            let page = first + layer * geometry.kv_heads + head;
            // SAFETY: `validate` proved that different (block, layer, head) have different rows.
            let bounds = unsafe { values.piece(page * row, row) };
            let (least, rest) = bounds.split_at_mut(dim);
            let (greatest, mean) = rest.split_at_mut(dim);
            let at = |slot: usize| geometry.key_offset(block, layer, head, slot);
            C::widen(&cache[at(begin as usize)..][..dim], &mut key);
            least.copy_from_slice(&key);
            greatest.copy_from_slice(&key);
            sums.fill(0.0);
            for slot in begin as usize..end as usize {
                C::widen(&cache[at(slot)..][..dim], &mut key);
                for (d, &x) in key.iter().enumerate() {
                    // Not `min` and `max`, which drop a NaN.
                    least[d] = if x < least[d] || x.is_nan() { x } else { least[d] };
                    greatest[d] = if x > greatest[d] || x.is_nan() { x } else { greatest[d] };
                    sums[d] += f64::from(x);
                }
            }
            let count = f64::from(end - begin);
            mean.iter_mut().zip(&sums).for_each(|(mean, sum)| {
                *mean = f32::from_f64(sum / count * f64::from(scale));
            });
            least.iter_mut().chain(greatest).for_each(|bound| *bound *= scale);
        }
    });
}
