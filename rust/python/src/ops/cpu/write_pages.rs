//! `write_pages` on the host.

use kvweave_core::ops::{BoundValues, Fp8Bounds, PageBounds, WritePages};
use pyo3::prelude::*;

use super::element::{run, with_rows};
use crate::arguments::{Table, count, head_rows, output, pages_of, raised, scales_of};
use crate::dlpack::borrow;
use crate::failure::Failure;
use crate::ops::bounded_pages::NumbersOfBounds;
use crate::reach::Reach;
use crate::scalars::Number;
use crate::tensor::TensorRef;

/// Bounds of pages to bring up to date, the table of those that are, rows of bounds that stand for
/// blocks, and scales of bounds in fp8.
type BoundsArguments<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "each is named in Python")]
#[pyo3(signature = (cache, layer, k, v, slots, reach, bounds, kv_scales, reference))]
pub fn write_pages(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    layer: Number,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    slots: &Bound<'_, PyAny>,
    reach: Option<&Bound<'_, Reach>>,
    bounds: Option<BoundsArguments<'_>>,
    kv_scales: Option<(f32, f32)>,
    reference: bool,
) -> PyResult<()> {
    let owner = borrow("cache", cache)?;
    let cache = owner.tensor;
    let (k, v) = (borrow("k", k)?, borrow("v", v)?);
    let slots = Table::of("slots", slots)?;
    let reach = reach.map(|reach| reach.get().core());
    let bounds = bounds
        .map(|(values, held, rows, scales)| {
            let rows = rows.map(|rows| Table::of("rows", &rows)).transpose()?;
            let scales = scales.map(|scales| borrow("scales", &scales)).transpose()?;
            Ok::<_, PyErr>((borrow("bounds", &values)?, Table::of("held", &held)?, rows, scales))
        })
        .transpose()?;
    with_rows!(py, cache.dtype, ("k", k.tensor.dtype), (T, C) => {
        let params = || {
            let (k, v) = (&k.tensor, &v.tensor);
            let layer = count("layer", layer)?;
            let keys = head_rows::<T>("k", k)?;
            let values = head_rows::<T>("v", v)?;
            let geometry = pages_of(&cache, layer.saturating_add(1), keys.heads)?;
            cache.expect_apart("cache", k, "k")?;
            cache.expect_apart("cache", v, "v")?;
            cache.expect_apart("cache", &slots.0.tensor, "slots")?;
            let mut read = vec![("cache", &cache), ("k", k), ("v", v), ("slots", &slots.0.tensor)];
            let bounds = match &bounds {
                Some((values, held, rows, scales)) => {
                    read.push(("held", &held.0.tensor));
                    if let Some(rows) = rows {
                        read.push(("rows", &rows.0.tensor));
                        cache.expect_apart("cache", &rows.0.tensor, "rows")?;
                    }
                    let scales = scales.as_ref().map(|scales| &scales.tensor);
                    let dim = geometry.head_dim;
                    let values = values_of(&values.tensor, scales, dim, &read)?;
                    cache.expect_apart("cache", &held.0.tensor, "held")?;
                    let rows = rows.as_ref().map(|rows| rows.list("rows")).transpose()?;
                    Some(PageBounds { values, held: held.rows("held")?, rows })
                }
                None => None,
            };
            let slots = slots.slots("slots", reach)?;
            // SAFETY: no other argument overlaps it; others are excluded as `arguments` says.
            let cache = unsafe { cache.slice_mut::<C>("cache") }?;
            let scales = scales_of(kv_scales);
            Ok(WritePages { cache, geometry, layer, scales, keys, values, slots, reach, bounds })
        };
        run!(py, reference, write_pages, raised(py, params())?)
    })
}

/// What bounds of heads of D elements are written to.
fn values_of<'a>(
    values: &TensorRef,
    scales: Option<&TensorRef>,
    head_dim: usize,
    read: &[(&str, &TensorRef)],
) -> Result<BoundValues<'a>, Failure> {
    let numbers = NumbersOfBounds::of(values, None, scales.is_some())?;
    let shape = [("pages", None), numbers.layout(values).1, ("D", Some(head_dim))];
    if let (NumbersOfBounds::Fp8(score), Some(scales)) = (numbers, scales) {
        let pages = [("pages", values.shape().first().copied())];
        let numbers = output("bounds", values, &shape, read)?;
        let mut read = read.to_vec();
        read.push(("bounds", values));
        let scales = output("scales", scales, &pages, &read)?;
        return Ok(BoundValues::Fp8(Fp8Bounds { score, numbers, scales }));
    }
    Ok(BoundValues::F32(output("bounds", values, &shape, read)?))
}
