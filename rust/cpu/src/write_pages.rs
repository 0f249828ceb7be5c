//! New keys and values into pages, and bounds of pages.

use kvweave_core::ops::{Element, OpError, PageBounds, PageGeometry, WritePages};
use rayon::prelude::*;

use crate::disjoint::Disjoint;

/// Rows of one task: below this, threads cost more than they bring.
const CHUNK: usize = 64;

/// See [`WritePages`].
///
/// # Errors
/// What [`WritePages::validate`] refuses.
pub fn write_pages<T: Element>(params: WritePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let places = params.places();
    let WritePages { cache, geometry, layer, keys, values, bounds, .. } = params;
    let dim = geometry.head_dim;
    let pages = Disjoint::new(cache);
    (0..keys.rows).into_par_iter().with_min_len(CHUNK).for_each(|row| {
        for head in 0..geometry.kv_heads {
            let Some(key) = places.key_offset(row, head) else { continue };
            // SAFETY: `validate` proved that different (row, head, key or value) share no element.
            unsafe { pages.piece(key, dim) }.copy_from_slice(keys.vector(row, head));
            let value = key + geometry.value_offset;
            // SAFETY: as for the key.
            unsafe { pages.piece(value, dim) }.copy_from_slice(values.vector(row, head));
        }
    });
    if let Some(bounds) = bounds {
        update_bounds(cache, &geometry, layer, bounds);
    }
    Ok(())
}

fn update_bounds<T: Element>(
    cache: &[T],
    geometry: &PageGeometry,
    layer: usize,
    PageBounds { values, held }: PageBounds<'_>,
) {
    let (dim, row) = (geometry.head_dim, PageBounds::row_len(geometry.head_dim));
    let values = Disjoint::new(values);
    held.par_iter().for_each(|&[block, begin, end]| {
        let block = block as usize;
        let (mut key, mut sums) = (vec![0.0; dim], vec![0.0; dim]);
        for head in 0..geometry.kv_heads {
            let page = block + layer * geometry.kv_heads + head;
            // SAFETY: `validate` proved that different (block, layer, head) are different pages.
            let bounds = unsafe { values.piece(page * row, row) };
            let (least, rest) = bounds.split_at_mut(dim);
            let (greatest, mean) = rest.split_at_mut(dim);
            let at = |slot: usize| geometry.key_offset(block, layer, head, slot);
            T::widen(&cache[at(begin as usize)..][..dim], &mut key);
            least.copy_from_slice(&key);
            greatest.copy_from_slice(&key);
            sums.fill(0.0);
            for slot in begin as usize..end as usize {
                T::widen(&cache[at(slot)..][..dim], &mut key);
                for (d, &x) in key.iter().enumerate() {
                    // Not `min` and `max`, which drop a NaN.
                    least[d] = if x < least[d] || x.is_nan() { x } else { least[d] };
                    greatest[d] = if x > greatest[d] || x.is_nan() { x } else { greatest[d] };
                    sums[d] += f64::from(x);
                }
            }
            let count = f64::from(end - begin);
            mean.iter_mut().zip(&sums).for_each(|(mean, sum)| *mean = f32::from_f64(sum / count));
        }
    });
}
