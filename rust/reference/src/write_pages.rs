//! New keys and values into pages, and bounds of pages.

use kvweave_core::ops::{
    BoundValues, Cached, Element, OpError, PageBounds, PageGeometry, WritePages, fp8_vectors,
    round_bounds,
};

/// See [`WritePages`].
///
/// # Errors
/// What [`WritePages::validate`] refuses.
pub fn write_pages<T: Element, C: Cached<T>>(params: WritePages<'_, T, C>) -> Result<(), OpError> {
    params.validate()?;
    let places = params.write_slots();
    let WritePages { cache, geometry, layer, scales, keys, values, bounds, .. } = params;
    let dim = geometry.head_dim;
    for row in 0..keys.rows {
        for head in 0..geometry.kv_heads {
            let Some(key) = places.key_offset(row, head) else { continue };
            let value = key + geometry.value_offset;
            C::store(keys.vector(row, head), scales.key, &mut cache[key..key + dim]);
            C::store(values.vector(row, head), scales.value, &mut cache[value..value + dim]);
        }
    }
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
    PageBounds { mut values, held, rows }: PageBounds<'_>,
) {
    let dim = geometry.head_dim;
    let mut of_page = vec![0.0; PageBounds::row_len(dim)];
    for (i, &[block, begin, end]) in held.iter().enumerate() {
        for head in 0..geometry.kv_heads {
            let first = PageBounds::first_row(held, rows, i);
            let page = first + layer * geometry.kv_heads + head;
            for d in 0..dim {
                let element = |slot| geometry.key_offset(block as usize, layer, head, slot) + d;
                let keys: Vec<f64> = (begin as usize..end as usize)
                    .map(|slot| cache[element(slot)].to_f64())
                    .collect();
                for (which, bound) in bounds_of(&keys, scale).into_iter().enumerate() {
                    of_page[which * dim + d] = bound;
                }
            }
            match &mut values {
                BoundValues::F32(values) => {
                    values[page * of_page.len()..][..of_page.len()].copy_from_slice(&of_page);
                }
                BoundValues::Fp8(bounds) => {
                    let row = fp8_vectors(bounds.score) * dim;
                    let numbers = &mut bounds.numbers[page * row..][..row];
                    bounds.scales[page] = round_bounds(bounds.score, &of_page, numbers).to_bits();
                }
            }
        }
    }
}

/// Min, max and mean of one element of a page's stored keys, each times their scale.
fn bounds_of(keys: &[f64], scale: f32) -> [f32; 3] {
    if keys.iter().any(|key| key.is_nan()) {
        return [f32::NAN; 3];
    }
    let least = keys.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = keys.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mean = keys.iter().sum::<f64>() / keys.len() as f64;
    [least, greatest, mean].map(|bound| f32::from_f64(bound * f64::from(scale)))
}
