//! `pack_pages` and `unpack_pages` on CUDA.

use kvweave_core::ops::Packs;
use kvweave_cuda::{PackDirection, PackPagesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of};
use super::bases::{BasesThere, GivenBases, placed};
use super::device::backend;
use crate::arguments::{count, page_tokens_of, raised};
use crate::dlpack::borrow;
use crate::dtype::{DType, ROWS};
use crate::failure::{Failure, call_core};
use crate::packed::PackedFormat;
use crate::scalars::Number;

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, packed, format, packs, pages, bases, stream))]
pub fn pack_pages_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    packed: &Bound<'_, PyAny>,
    format: &Bound<'_, PackedFormat>,
    packs: TablePair<'_>,
    pages: Number,
    bases: GivenBases<'_>,
    stream: u64,
) -> PyResult<()> {
    let sides = Sides { cache, packed, format, bases };
    launch(py, PackDirection::Pack, &sides, &packs, pages, stream)
}

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, packed, format, packs, pages, bases, in_basis, in_order, stream))]
pub fn unpack_pages_cuda(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    packed: &Bound<'_, PyAny>,
    format: &Bound<'_, PackedFormat>,
    packs: TablePair<'_>,
    pages: Number,
    bases: GivenBases<'_>,
    in_basis: bool,
    in_order: bool,
    stream: u64,
) -> PyResult<()> {
    let sides = Sides { cache, packed, format, bases };
    let direction = match (in_basis, in_order) {
        (true, _) => PackDirection::Spread,
        (false, true) => PackDirection::Unpack,
        (false, false) => PackDirection::Restore,
    };
    launch(py, direction, &sides, &packs, pages, stream)
}

/// Exact pages, packed ones, and what these are.
struct Sides<'a, 'py> {
    cache: &'a Bound<'py, PyAny>,
    packed: &'a Bound<'py, PyAny>,
    format: &'a Bound<'py, PackedFormat>,
    bases: GivenBases<'py>,
}

fn launch<'py>(
    py: Python<'py>,
    direction: PackDirection,
    Sides { cache, packed, format, bases }: &Sides<'_, 'py>,
    packs: &TablePair<'py>,
    pages: Number,
    stream: u64,
) -> PyResult<()> {
    let (cache, packed) = (borrow("cache", cache)?, borrow("packed pages", packed)?);
    let (cache, packed) = (&cache.tensor, &packed.tensor);
    let (table, given) = (DeviceTable::of("packs", packs)?, BasesThere::of(bases)?);
    let checks = || {
        let place = Place::of("cache", cache)?;
        if place.dtype.is_quantised() {
            return Err(Failure::invalid("cache", ROWS, cache.dtype.name()));
        }
        place.expect("packed pages", packed, DType::U8)?;
        format.get().expect_pages("packed pages", packed)?;
        let format = format.get().format;
        let (bases, checked) = placed(given.as_ref(), &place, &format, packed.shape()[0])?;
        let page_tokens = page_tokens_of(cache, &format)?;
        let pages = count("pages", pages)?;
        let width = Packs { format, page_tokens, pages, bases: None, rows: &[] }.width();
        let (packs, rows) = table.wide("packs", &place, width)?;
        cache.expect_apart("cache", packed, "packed pages")?;
        for (what, side) in [("cache", cache), ("packed pages", packed)] {
            side.expect_apart(what, &table.on_device.tensor, "packs")?;
            given.as_ref().map_or(Ok(()), |bases| bases.expect_apart(what, side))?;
        }
        match direction {
            PackDirection::Pack => packed.expect_writable("packed pages")?,
            PackDirection::Unpack | PackDirection::Restore | PackDirection::Spread => {
                cache.expect_writable("cache")?
            }
        }
        let launch = PackPagesLaunch {
            direction,
            cache: extent_of("cache", cache)?,
            dtype: place.dtype,
            packed: extent_of("packed pages", packed)?,
            format,
            bases,
            packs,
            rows,
            page_tokens,
            pages,
            stream,
        };
        Ok((place.ordinal, launch, (table.wide_on_host("packs", width)?, checked)))
    };
    let (ordinal, launch, (on_host, checked)) = raised(py, checks())?;
    call_core(py, || {
        let PackPagesLaunch { cache, packed, format, page_tokens, pages, .. } = launch;
        let rows = on_host.unwrap_or(&[]);
        let packs = Packs { format, page_tokens, pages, bases: None, rows };
        packs.validate(cache.len, packed.len, direction != PackDirection::Pack)?;
        if direction == PackDirection::Spread {
            packs.expect_basis()?;
        }
        if let Some(bases) = checked {
            packs.iter().try_for_each(|pack| bases.check_block(&format, pack.block, pages - 1))?;
        }
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed. That no block is written twice was checked on the host, or is the
        // caller's promise where the table is on the device.
        unsafe { backend(ordinal)?.pack_pages(&launch) }.map_err(Failure::from)
    })
}
