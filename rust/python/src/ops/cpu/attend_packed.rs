//! `attend_packed` on the host.

use kvweave_core::ops::AttendPacked;
use pyo3::prelude::*;

use super::element::{run, with_element};
use super::reading::Attention;
use crate::arguments::{Table, raised};
use crate::dlpack::borrow;
use crate::dtype::ROWS;
use crate::ops::reading::AttentionArguments;
use crate::packed::{BasesGiven, PackedFormat};

/// The cache of `arguments` are packed pages of `format`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, format, bases, entry_offsets, out, lse, reference))]
pub fn attend_packed(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    format: &Bound<'_, PackedFormat>,
    bases: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    entry_offsets: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    reference: bool,
) -> PyResult<()> {
    let call = Attention::of(py, &arguments)?;
    let bases = BasesGiven::of(bases.as_ref())?;
    let entry_offsets = Table::of("entry_offsets", entry_offsets)?;
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    with_element!(py, ("q", ROWS), call.q.tensor.dtype, T => {
        let params = || {
            let kv = call.packed(format.get(), bases.as_ref())?;
            let queries = call.queries::<T>()?;
            for (what, written) in [("out", &out.tensor), ("lse", &lse.tensor)] {
                bases.as_ref().map_or(Ok(()), |bases| bases.expect_apart(what, written))?;
            }
            let (out, lse) = call.results(&out.tensor, &lse.tensor)?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            Ok(AttendPacked { queries, kv, scoring: call.scoring, entry_offsets, out, lse })
        };
        run!(py, reference, attend_packed, raised(py, params())?)
    })
}
