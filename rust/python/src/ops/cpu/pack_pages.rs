//! `pack_pages` and `unpack_pages` on the host.

use kvweave_core::ops::{PackPages, Packs, UnpackPages};
use pyo3::prelude::*;

use super::element::{run, with_element};
use crate::arguments::{Table, count, page_tokens_of, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::ROWS;
use crate::failure::Failure;
use crate::packed::{BasesGiven, PackedFormat};
use crate::scalars::Number;

/// The arguments of either, borrowed.
struct Sides<'py> {
    cache: Borrowed<'py>,
    packed: Borrowed<'py>,
    rows: Table<'py>,
    bases: Option<BasesGiven<'py>>,
}

impl<'py> Sides<'py> {
    fn of(
        cache: &Bound<'py, PyAny>,
        packed: &Bound<'py, PyAny>,
        packs: &Bound<'py, PyAny>,
        bases: Option<&(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    ) -> PyResult<Self> {
        let (cache, packed) = (borrow("cache", cache)?, borrow("packed pages", packed)?);
        let (rows, bases) = (Table::of("packs", packs)?, BasesGiven::of(bases)?);
        Ok(Self { cache, packed, rows, bases })
    }

    /// What is packed where; the side that is written lies apart from all that is read.
    fn packs(&self, format: &PackedFormat, pages: Number) -> Result<Packs<'_>, Failure> {
        let (cache, packed) = (&self.cache.tensor, &self.packed.tensor);
        format.expect_pages("packed pages", packed)?;
        let format = format.format;
        let page_tokens = page_tokens_of(cache, &format)?;
        let pages = count("pages", pages)?;
        let bases = self.bases.as_ref().map(|bases| bases.core(&format)).transpose()?;
        let mut packs = Packs { format, page_tokens, pages, bases, rows: &[] };
        packs.rows = self.rows.wide("packs", packs.width())?;
        cache.expect_apart("cache", packed, "packed pages")?;
        for (what, side) in [("cache", cache), ("packed pages", packed)] {
            side.expect_apart(what, &self.rows.0.tensor, "packs")?;
            if let Some(bases) = &self.bases {
                bases.expect_apart(what, side)?;
            }
        }
        Ok(packs)
    }
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, packed, format, packs, pages, bases, reference))]
pub fn pack_pages(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    packed: &Bound<'_, PyAny>,
    format: &Bound<'_, PackedFormat>,
    packs: &Bound<'_, PyAny>,
    pages: Number,
    bases: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    reference: bool,
) -> PyResult<()> {
    let sides = Sides::of(cache, packed, packs, bases.as_ref())?;
    with_element!(py, ("cache", ROWS), sides.cache.tensor.dtype, C => {
        let params = || {
            let packs = sides.packs(format.get(), pages)?;
            // SAFETY: no other argument overlaps what is written; others are excluded as
            // `arguments` says.
            let (cache, packed) = unsafe {
                let cache = sides.cache.tensor.slice::<C>("cache")?;
                (cache, sides.packed.tensor.bytes_mut("packed pages")?)
            };
            Ok(PackPages { cache, packed, packs })
        };
        run!(py, reference, pack_pages, raised(py, params())?)
    })
}

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, packed, format, packs, pages, bases, in_basis, reference))]
pub fn unpack_pages(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    packed: &Bound<'_, PyAny>,
    format: &Bound<'_, PackedFormat>,
    packs: &Bound<'_, PyAny>,
    pages: Number,
    bases: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    in_basis: bool,
    reference: bool,
) -> PyResult<()> {
    let sides = Sides::of(cache, packed, packs, bases.as_ref())?;
    with_element!(py, ("cache", ROWS), sides.cache.tensor.dtype, C => {
        let params = || {
            let packs = sides.packs(format.get(), pages)?;
            // SAFETY: no other argument overlaps what is written; others are excluded as
            // `arguments` says.
            let (cache, packed) = unsafe {
                let cache = sides.cache.tensor.slice_mut::<C>("cache")?;
                (cache, sides.packed.tensor.bytes("packed pages")?)
            };
            Ok(UnpackPages { cache, packed, packs, in_basis })
        };
        run!(py, reference, unpack_pages, raised(py, params())?)
    })
}
