//! `copy_rerotate` on CUDA.

use kvweave_core::ops::validate_copies;
use kvweave_cuda::CopyRerotateLaunch;
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, reach_of};
use super::device::backend;
use crate::arguments::{count, pages_of, raised};
use crate::dlpack::borrow;
use crate::failure::{Failure, entry};
use crate::rope::RopeTable;

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, copies, rope, kv_heads, stream))]
pub fn copy_rerotate_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    copies: TablePair<'_>,
    rope: &Bound<'_, RopeTable>,
    kv_heads: i64,
    stream: u64,
) -> PyResult<()> {
    let (cache, copies) = (borrow("cache", cache)?, DeviceTable::of("copies", &copies)?);
    let (cache, rope) = (&cache.tensor, rope.get());
    let checks = || {
        let place = Place::of("cache", cache)?;
        let layers = rope.table.layers();
        let geometry = pages_of(cache, layers, count("kv_heads", kv_heads)?)?;
        cache.expect_writable("cache")?;
        let (table, copy_count) = copies.rows::<6>("copies", &place)?;
        copies.on_device.tensor.expect_apart("copies", cache, "cache")?;
        let on_host = copies.rows_on_host::<6>("copies")?;
        Ok((place, geometry, table, copy_count, on_host, reach_of("cache", cache)?))
    };
    let (place, geometry, copies, copy_count, on_host, cache) = raised(py, checks())?;
    entry(py, || {
        if let Some(rows) = on_host {
            validate_copies(rows, &geometry, &rope.table, cache.len)?;
        }
        let backend = backend(place.ordinal)?;
        let inv_freq = rope.on(&backend, place.ordinal)?;
        let launch = CopyRerotateLaunch {
            cache,
            dtype: place.dtype,
            geometry,
            copies,
            copy_count,
            inv_freq: &inv_freq,
            pairs: rope.table.pairs(),
            pairing: rope.table.pairing(),
            stream,
        };
        // SAFETY: both tensors were read from live owners on this device, which torch keeps until
        // the stream has passed; the table lives as long as `rope`. Blocks read and written were
        // checked on the host, or are the caller's promise where the table is on the device.
        unsafe { backend.copy_rerotate(&launch) }.map_err(Failure::from)
    })
}
