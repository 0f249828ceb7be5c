//! New keys and values into pages, and bounds of pages.

use kvweave_core::ops::{Element, OpError, PageBounds, PageGeometry, WritePages};

/// See [`WritePages`].
///
/// # Errors
/// What [`WritePages::validate`] refuses.
pub fn write_pages<T: Element>(params: WritePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let places = params.places();
    let WritePages { cache, geometry, layer, keys, values, bounds, .. } = params;
    let dim = geometry.head_dim;
    for row in 0..keys.rows {
        for head in 0..geometry.kv_heads {
            let Some(key) = places.key_offset(row, head) else { continue };
            let value = key + geometry.value_offset;
            cache[key..key + dim].copy_from_slice(keys.vector(row, head));
            cache[value..value + dim].copy_from_slice(values.vector(row, head));
        }
    }
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
    let dim = geometry.head_dim;
    for &[block, begin, end] in held {
        for head in 0..geometry.kv_heads {
            let page = block as usize + layer * geometry.kv_heads + head;
            for d in 0..dim {
                let element = |slot| geometry.key_offset(block as usize, layer, head, slot) + d;
                let keys: Vec<f64> = (begin as usize..end as usize)
                    .map(|slot| cache[element(slot)].to_f64())
                    .collect();
                for (which, bound) in bounds_of(&keys).into_iter().enumerate() {
                    values[page * PageBounds::row_len(dim) + which * dim + d] = bound;
                }
            }
        }
    }
}

/// Min, max and mean of one element of a page's keys.
fn bounds_of(keys: &[f64]) -> [f32; 3] {
    if keys.iter().any(|key| key.is_nan()) {
        return [f32::NAN; 3];
    }
    let least = keys.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = keys.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = keys.iter().sum::<f64>() / keys.len() as f64;
    [least, greatest, mean].map(f32::from_f64)
}
