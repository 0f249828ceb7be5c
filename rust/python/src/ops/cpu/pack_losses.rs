//! `pack_losses` on the host.

use kvweave_core::ops::{PackLosses, Packs};
use numpy::{PyArray1, PyArray3, PyArrayMethods};
use pyo3::prelude::*;

use super::element::{run, with_element};
use crate::arguments::{Table, count, output, page_tokens_of, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::{DType, ROWS};
use crate::failure::Failure;
use crate::packed::PackedFormat;
use crate::scalars::Number;
use crate::tensor::Stored;

/// What each of some pages loses, f64 [2, K, 2].
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (cache, format, packs, pages, ranks, basis, roots, left_out, packed, reference))]
pub fn pack_losses<'py>(
    py: Python<'py>,
    cache: &Bound<'py, PyAny>,
    format: &Bound<'py, PackedFormat>,
    packs: &Bound<'py, PyAny>,
    pages: Number,
    ranks: &Bound<'py, PyAny>,
    basis: Option<Bound<'py, PyAny>>,
    roots: Option<Bound<'py, PyAny>>,
    left_out: Number,
    packed: Option<Bound<'py, PyAny>>,
    reference: bool,
) -> PyResult<Bound<'py, PyArray3<f64>>> {
    let format = format.get().format;
    let cache = borrow("cache", cache)?;
    let (rows, ranks) = (Table::of("packs", packs)?, Table::of("ranks", ranks)?);
    let basis = Given::of("basis", basis.as_ref())?;
    let roots = Given::of("roots", roots.as_ref())?;
    let packed = Given::of("packed pages", packed.as_ref())?;
    let some = raised(py, ranks.numbers("ranks"))?;
    let mut sums = vec![0.0; 4 * some.len()];
    with_element!(py, ("cache", ROWS), cache.tensor.dtype, C => {
        let sums = &mut sums[..];
        let params = || {
            let page_tokens = page_tokens_of(&cache.tensor, &format)?;
            let (pages, left_out) = (count("pages", pages)?, count("left_out", left_out)?);
            let mut packs = Packs { format, page_tokens, pages, bases: None, rows: &[] };
            packs.rows = rows.wide("packs", packs.width())?;
            let (held, dim) = (("K", Some(some.len())), ("D", Some(format.head_dim())));
            let sides = [held, ("2", Some(2)), ("rows", format.basis_rows()), dim];
            let bytes = ("bytes", Some(format.page_bytes()));
            let blocks = ("N", Some(packs.rows.len() / packs.width()));
            if let Some(packed) = &packed {
                packed.expect_apart(&[("cache", &cache), ("packs", &rows.0), ("ranks", &ranks.0)])?;
                for other in [&basis, &roots].into_iter().flatten() {
                    packed.expect_apart(&[(other.what, &other.tensor)])?;
                }
            }
            let basis = basis.as_ref().map(|basis| basis.read(DType::F32, &sides)).transpose()?;
            let roots =
                roots.as_ref().map(|roots| roots.read(DType::F64, &[held, dim, dim])).transpose()?;
            let packed = packed.as_ref().map(|packed| packed.written(&[blocks, held, bytes]));
            let packed = packed.transpose()?;
            // SAFETY: what is written is apart from it; writers are excluded as `arguments` says.
            let cache = unsafe { cache.tensor.slice::<C>("cache")? };
            Ok(PackLosses { cache, packs, ranks: some, basis, roots, left_out, packed, sums })
        };
        run!(py, reference, pack_losses, raised(py, params())?)
    })?;
    let count = sums.len() / 4;
    PyArray1::from_vec(py, sums).reshape([2, count, 2])
}

/// A contiguous tensor that need not be there.
struct Given<'py> {
    what: &'static str,
    tensor: Borrowed<'py>,
}

impl<'py> Given<'py> {
    fn of(what: &'static str, given: Option<&Bound<'py, PyAny>>) -> PyResult<Option<Self>> {
        given.map(|tensor| Ok(Self { what, tensor: borrow(what, tensor)? })).transpose()
    }

    /// Refuses one that is written and shares memory with others.
    fn expect_apart(&self, others: &[(&str, &Borrowed<'_>)]) -> Result<(), Failure> {
        let of = &self.tensor.tensor;
        others.iter().try_for_each(|(what, other)| of.expect_apart(self.what, &other.tensor, what))
    }

    fn read<T: Stored>(
        &self,
        dtype: DType,
        shape: &[(&str, Option<usize>)],
    ) -> Result<&[T], Failure> {
        let tensor = &self.tensor.tensor;
        tensor.expect_dtype(self.what, dtype)?;
        tensor.expect_shape(self.what, shape)?;
        tensor.expect_contiguous(self.what)?;
        // SAFETY: the owner is held by `self`; writers are excluded as `arguments` says.
        unsafe { tensor.slice(self.what) }
    }

    /// Bytes to be written; others lie apart from them, as `expect_apart` has proved.
    fn written(&self, shape: &[(&str, Option<usize>)]) -> Result<&mut [u8], Failure> {
        self.tensor.tensor.expect_dtype(self.what, DType::U8)?;
        output(self.what, &self.tensor.tensor, shape, &[])
    }
}
