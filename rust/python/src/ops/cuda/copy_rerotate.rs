//! `copy_rerotate` on CUDA.

use kvweave_core::ops::{validate_copies, validate_layers};
use kvweave_cuda::CopyRerotateLaunch;
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of};
use super::device::backend;
use crate::arguments::{count, pages_of, raised, source_of};
use crate::dlpack::borrow;
use crate::failure::{Failure, call_core};
use crate::rope::RopeTable;
use crate::scalars::Number;

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, source, copies, rope, kv_heads, layers, stream))]
#[expect(clippy::too_many_arguments, reason = "the arguments of one op")]
pub fn copy_rerotate_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    source: Option<&Bound<'_, PyAny>>,
    copies: TablePair<'_>,
    rope: &Bound<'_, RopeTable>,
    kv_heads: Number,
    layers: Option<TablePair<'_>>,
    stream: u64,
) -> PyResult<()> {
    let (cache, copies) = (borrow("cache", cache)?, DeviceTable::of("copies", &copies)?);
    let source = source.map(|source| borrow("source", source)).transpose()?;
    let (cache, rope) = (&cache.tensor, rope.get());
    let layers = layers.map(|layers| DeviceTable::of("layers", &layers)).transpose()?;
    let checks = || {
        let place = Place::of("cache", cache)?;
        let geometry = pages_of(cache, rope.table.layers(), count("kv_heads", kv_heads)?)?;
        cache.expect_writable("cache")?;
        let mut read = None;
        if let Some(source) = &source {
            place.expect("source", &source.tensor, cache.dtype)?;
            read = Some((
                extent_of("source", &source.tensor)?,
                source_of(&source.tensor, cache, &geometry)?,
            ));
        }
        let (table, copy_count) = copies.rows::<6>("copies", &place)?;
        copies.on_device.tensor.expect_apart("copies", cache, "cache")?;
        let (mut page_layers, mut layers_on_host) = (None, None);
        if let Some(layers) = &layers {
            layers.on_device.tensor.expect_apart("layers", cache, "cache")?;
            page_layers = Some(layers.list("layers", &place)?);
            layers_on_host = layers.list_on_host("layers")?;
        }
        let tables = ((table, copy_count), page_layers);
        let on_host = (copies.rows_on_host::<6>("copies")?, layers_on_host);
        Ok((place, geometry, tables, on_host, (extent_of("cache", cache)?, read)))
    };
    let (place, geometry, tables, on_host, (cache, source)) = raised(py, checks())?;
    let ((copies, copy_count), page_layers) = tables;
    call_core(py, || {
        let (rows, layers) = on_host;
        let pages = page_layers.map(|(_, pages)| pages);
        let read = source.map(|(source, of)| (of, source.len));
        validate_copies(rows.unwrap_or(&[]), &geometry, &rope.table, (cache.len, pages), read)?;
        layers.map_or(Ok(()), |layers| validate_layers(layers, &geometry))?;
        let backend = backend(place.ordinal)?;
        let inv_freq = rope.on(&backend, place.ordinal)?;
        let launch = CopyRerotateLaunch {
            cache,
            dtype: place.dtype,
            geometry,
            source,
            copies,
            copy_count,
            inv_freq: &inv_freq,
            pairs: rope.table.pairs(),
            pairing: rope.table.pairing(),
            page_layers,
            stream,
        };
        // SAFETY: all tensors were read from live owners on this device, which torch keeps until
        // the stream has passed; the table lives as long as `rope`. Blocks read and written were
        // checked on the host, or are the caller's promise where the table is on the device.
        unsafe { backend.copy_rerotate(&launch) }.map_err(Failure::from)
    })
}
