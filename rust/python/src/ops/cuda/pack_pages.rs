//! `pack_pages` and `unpack_pages` on CUDA.

use kvweave_core::ops::Packs;
use kvweave_cuda::{PackDirection, PackPagesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of};
use super::device::backend;
use crate::arguments::{count, page_tokens_of, raised};
use crate::dlpack::borrow;
use crate::dtype::{DType, ROWS};
use crate::failure::{Failure, call_core};
use crate::packed::PackedFormat;
use crate::scalars::Number;

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, packed, format, packs, pages, stream))]
pub fn pack_pages_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    packed: &Bound<'_, PyAny>,
    format: &Bound<'_, PackedFormat>,
    packs: TablePair<'_>,
    pages: Number,
    stream: u64,
) -> PyResult<()> {
    launch(py, PackDirection::Pack, (cache, packed, format), &packs, pages, stream)
}

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, packed, format, packs, pages, stream))]
pub fn unpack_pages_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    packed: &Bound<'_, PyAny>,
    format: &Bound<'_, PackedFormat>,
    packs: TablePair<'_>,
    pages: Number,
    stream: u64,
) -> PyResult<()> {
    launch(py, PackDirection::Unpack, (cache, packed, format), &packs, pages, stream)
}

/// Exact pages, packed ones, and what these are.
type Sides<'a, 'py> = (&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>, &'a Bound<'py, PackedFormat>);

fn launch<'py>(
    py: Python<'py>,
    direction: PackDirection,
    (cache, packed, format): Sides<'_, 'py>,
    packs: &TablePair<'py>,
    pages: Number,
    stream: u64,
) -> PyResult<()> {
    let (cache, packed) = (borrow("cache", cache)?, borrow("packed pages", packed)?);
    let (cache, packed) = (&cache.tensor, &packed.tensor);
    let table = DeviceTable::of("packs", packs)?;
    let checks = || {
        let place = Place::of("cache", cache)?;
        if place.dtype.is_quantised() {
            return Err(Failure::invalid("cache", ROWS, cache.dtype.name()));
        }
        place.expect("packed pages", packed, DType::U8)?;
        format.get().expect_pages("packed pages", packed)?;
        let format = format.get().format;
        let page_tokens = page_tokens_of(cache, &format)?;
        let pages = count("pages", pages)?;
        let width = Packs { format, page_tokens, pages, bases: None, rows: &[] }.width();
        let (packs, rows) = table.wide("packs", &place, width)?;
        cache.expect_apart("cache", packed, "packed pages")?;
        for (what, side) in [("cache", cache), ("packed pages", packed)] {
            side.expect_apart(what, &table.on_device.tensor, "packs")?;
        }
        match direction {
            PackDirection::Pack => packed.expect_writable("packed pages")?,
            PackDirection::Unpack => cache.expect_writable("cache")?,
        }
        let launch = PackPagesLaunch {
            direction,
            cache: extent_of("cache", cache)?,
            dtype: place.dtype,
            packed: extent_of("packed pages", packed)?,
            format,
            packs,
            rows,
            page_tokens,
            pages,
            stream,
        };
        Ok((place.ordinal, launch, table.wide_on_host("packs", width)?))
    };
    let (ordinal, launch, on_host) = raised(py, checks())?;
    call_core(py, || {
        let PackPagesLaunch { cache, packed, format, page_tokens, pages, .. } = launch;
        let rows = on_host.unwrap_or(&[]);
        let packs = Packs { format, page_tokens, pages, bases: None, rows };
        packs.validate(cache.len, packed.len, direction == PackDirection::Unpack)?;
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed. That no block is written twice was checked on the host, or is the
        // caller's promise where the table is on the device.
        unsafe { backend(ordinal)?.pack_pages(&launch) }.map_err(Failure::from)
    })
}
