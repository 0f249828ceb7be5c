//! New keys and values into pages, and bounds of pages.

use kvweave_core::ops::{
    BoundValues, Cached, Element, Fp8Bounds, Fp8E4m3, OpError, PageBounds, PageGeometry, PageScore,
    WritePages, fp8_vectors, round_bounds,
};
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
    let dim = geometry.head_dim;
    let to = Rows::of(values);
    held.par_iter().enumerate().for_each(|(i, &[block, begin, end])| {
        let slots = begin as usize..end as usize;
        let (mut key, mut sums) = (vec![0.0; dim], vec![0.0; dim]);
        let mut bounds = vec![0.0; PageBounds::row_len(dim)];
        for head in 0..geometry.kv_heads {
            let at = |slot: usize| geometry.key_offset(block as usize, layer, head, slot);
            let keys = slots.clone().map(|slot| &cache[at(slot)..][..dim]);
            bounds_of(keys, scale, &mut bounds, (&mut key, &mut sums));
            let first = PageBounds::first_row(held, rows, i);
            // SAFETY: `validate` proved that different (block, layer, head) have different rows.
            unsafe { to.put(first + layer * geometry.kv_heads + head, &bounds) };
        }
    });
}

/// Min, max and mean [3, D] of keys, of which there is at least one.
fn bounds_of<'a, C: Element>(
    keys: impl ExactSizeIterator<Item = &'a [C]>,
    scale: f32,
    bounds: &mut [f32],
    (key, sums): (&mut [f32], &mut [f64]),
) {
    let (count, dim) = (keys.len() as f64, key.len());
    let (least, rest) = bounds.split_at_mut(dim);
    let (greatest, mean) = rest.split_at_mut(dim);
    sums.fill(0.0);
    for (slot, of_slot) in keys.enumerate() {
        C::widen(of_slot, key);
        if slot == 0 {
            least.copy_from_slice(key);
            greatest.copy_from_slice(key);
        }
        for (d, &x) in key.iter().enumerate() {
            // Not `min` and `max`, which drop a NaN.
            least[d] = if x < least[d] || x.is_nan() { x } else { least[d] };
            greatest[d] = if x > greatest[d] || x.is_nan() { x } else { greatest[d] };
            sums[d] += f64::from(x);
        }
    }
    mean.iter_mut().zip(&*sums).for_each(|(mean, sum)| {
        *mean = f32::from_f64(sum / count * f64::from(scale));
    });
    least.iter_mut().chain(greatest).for_each(|bound| *bound *= scale);
}

/// Rows of bounds that several threads write, each its own.
enum Rows<'a> {
    F32(Disjoint<'a, f32>),
    Fp8(PageScore, Disjoint<'a, Fp8E4m3>, Disjoint<'a, u8>),
}

impl<'a> Rows<'a> {
    fn of(values: BoundValues<'a>) -> Self {
        match values {
            BoundValues::F32(values) => Self::F32(Disjoint::new(values)),
            BoundValues::Fp8(Fp8Bounds { score, numbers, scales }) => {
                Self::Fp8(score, Disjoint::new(numbers), Disjoint::new(scales))
            }
        }
    }

    /// Writes a page's bounds [3, D].
    ///
    /// # Safety
    /// Nobody else has the page at the same time.
    unsafe fn put(&self, page: usize, bounds: &[f32]) {
        match self {
            Self::F32(values) => {
                // SAFETY: the caller's promise.
                let row = unsafe { values.piece(page * bounds.len(), bounds.len()) };
                row.copy_from_slice(bounds);
            }
            Self::Fp8(score, numbers, scales) => {
                let row = fp8_vectors(*score) * bounds.len() / 3;
                // SAFETY: the caller's promise.
                let (numbers, scales) =
                    unsafe { (numbers.piece(page * row, row), scales.piece(page, 1)) };
                scales[0] = round_bounds(*score, bounds, numbers).to_bits();
            }
        }
    }
}
