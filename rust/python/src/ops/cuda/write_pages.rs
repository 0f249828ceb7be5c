//! `write_pages` on CUDA.

use kvweave_core::ops::{WriteSlots, refuse_bounds, validate_bounds, validate_rows};
use kvweave_cuda::{BoundsLaunch, DeviceReach, WritePagesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of};
use super::device::backend;
use crate::arguments::{count, pages_of, raised, scales_of};
use crate::dlpack::{Borrowed, borrow};
use crate::failure::{Failure, call_core};
use crate::ops::bounded_pages::NumbersOfBounds;
use crate::reach::Reach;
use crate::scalars::Number;
use crate::tensor::TensorRef;

/// Bounds of pages to bring up to date, the table of those that are, rows of bounds that stand for
/// blocks, and scales of bounds in fp8.
type BoundsArguments<'py> =
    (Bound<'py, PyAny>, TablePair<'py>, Option<TablePair<'py>>, Option<Bound<'py, PyAny>>);

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "each is named in Python")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, layer, k, v, slots, reach, bounds, kv_scales, stream))]
pub fn write_pages_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    layer: Number,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    slots: TablePair<'_>,
    reach: Option<&Bound<'_, Reach>>,
    bounds: Option<BoundsArguments<'_>>,
    kv_scales: Option<(f32, f32)>,
    stream: u64,
) -> PyResult<()> {
    let (cache, k, v) = (borrow("cache", cache)?, borrow("k", k)?, borrow("v", v)?);
    let (cache, k, v) = (&cache.tensor, &k.tensor, &v.tensor);
    let slots = DeviceTable::of("slots", &slots)?;
    let reach = reach.map(Bound::get);
    let in_core = reach.map(Reach::core);
    let bounds = bounds.as_ref().map(Bounds::of).transpose()?;
    let checks = || {
        let place = Place::of("cache", cache)?.with_rows("k", k)?;
        let layer = count("layer", layer)?;
        let ((keys, key_rows), (values, value_rows)) = (place.rows("k", k)?, place.rows("v", v)?);
        let geometry = pages_of(cache, layer.saturating_add(1), key_rows.heads)?;
        let (table, rows) = slots.slots("slots", &place, in_core)?;
        let read = [("cache", cache), ("k", k), ("v", v), ("slots", &slots.on_device.tensor)];
        read[1..].iter().try_for_each(|(name, other)| cache.expect_apart("cache", other, name))?;
        cache.expect_writable("cache")?;
        validate_rows(&geometry, layer, [("k", &key_rows), ("v", &value_rows)], (rows, in_core))?;
        bounds.as_ref().map_or(Ok(()), |_| refuse_bounds(in_core))?;
        let of_pages = |bounds: &Bounds<'_>| bounds.launch(&place, geometry.head_dim, &read);
        let held = bounds.as_ref().map(Bounds::held_on_host).transpose()?.flatten();
        let launch = WritePagesLaunch {
            cache: extent_of("cache", cache)?,
            dtype: place.dtype,
            scales: scales_of(kv_scales),
            geometry,
            layer,
            keys,
            values,
            row_dtype: place.row_dtype,
            slots: table,
            rows: key_rows.rows,
            reach: None,
            bounds: bounds.as_ref().map(of_pages).transpose()?,
            stream,
        };
        Ok((place, launch, slots.slots_on_host("slots", in_core)?, held))
    };
    let (place, launch, slots, held) = raised(py, checks())?;
    call_core(py, || {
        let WritePagesLaunch { cache, geometry, layer, rows, bounds, .. } = launch;
        launch.scales.validate(place.dtype.is_quantised())?;
        if let Some(slots) = slots {
            WriteSlots { geometry, layer, slots, rows, reach: in_core }.validate(cache.len)?;
        }
        if let (Some(held), Some(bounds)) = (held, bounds) {
            validate_bounds(held, &geometry, layer, cache.len, bounds.pages(geometry.head_dim))?;
        }
        let backend = backend(place.ordinal)?;
        let heads = reach.map(|reach| reach.on(&backend, place.ordinal)).transpose()?;
        let tables = reach.map_or(1, Reach::tables);
        let reach = heads.as_deref().map(|heads| DeviceReach { tables, heads });
        let launch = WritePagesLaunch { reach, ..launch };
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed. That slots differ was checked on the host, or is the caller's
        // promise where the table is on the device.
        unsafe { backend.write_pages(&launch) }.map_err(Failure::from)
    })
}

type HeldRows<'a> = (&'a [[i32; 3]], Option<&'a [i32]>);

struct Bounds<'py> {
    values: Borrowed<'py>,
    held: DeviceTable<'py>,
    rows: Option<DeviceTable<'py>>,
    scales: Option<Borrowed<'py>>,
}

impl<'py> Bounds<'py> {
    fn of((values, held, rows, scales): &BoundsArguments<'py>) -> PyResult<Self> {
        let rows = rows.as_ref().map(|rows| DeviceTable::of("rows", rows)).transpose()?;
        let scales = scales.as_ref().map(|scales| borrow("scales", scales)).transpose()?;
        let (values, held) = (borrow("bounds", values)?, DeviceTable::of("held", held)?);
        Ok(Self { values, held, rows, scales })
    }

    fn launch(
        &self,
        place: &Place,
        head_dim: usize,
        read: &[(&str, &TensorRef)],
    ) -> Result<BoundsLaunch, Failure> {
        let (held, held_count) = self.held.rows::<3>("held", place)?;
        let (_, cache) = read[0];
        cache.expect_apart("cache", &self.held.on_device.tensor, "held")?;
        let mut read = read.to_vec();
        read.push(("held", &self.held.on_device.tensor));
        let mut rows = None;
        if let Some(table) = &self.rows {
            cache.expect_apart("cache", &table.on_device.tensor, "rows")?;
            read.push(("rows", &table.on_device.tensor));
            rows = Some(table.list("rows", place)?.0);
        }
        let bounds = &self.values.tensor;
        let scales = self.scales.as_ref().map(|scales| &scales.tensor);
        let numbers = NumbersOfBounds::of(bounds, Some(cache.dtype), scales.is_some())?;
        let (dtype, vectors) = numbers.layout(bounds);
        let shape = [("pages", None), vectors, ("D", Some(head_dim))];
        let values = place.output("bounds", bounds, (dtype, &shape), &read)?;
        read.push(("bounds", bounds));
        if let Some(scales) = scales {
            scales.expect_writable("scales")?;
            read.iter().try_for_each(|(name, read)| scales.expect_apart("scales", read, name))?;
        }
        let numbers = numbers.on_device(place, scales, bounds.shape()[0])?;
        Ok(BoundsLaunch { values, numbers, held, rows, held_count })
    }

    /// Held blocks and their rows, where both are looked at here.
    fn held_on_host(&self) -> Result<Option<HeldRows<'_>>, Failure> {
        let held = self.held.rows_on_host("held")?;
        let Some(table) = &self.rows else { return Ok(held.map(|held| (held, None))) };
        let rows = table.list_on_host("rows")?;
        Ok(held.zip(rows).map(|(held, rows)| (held, Some(rows))))
    }
}
