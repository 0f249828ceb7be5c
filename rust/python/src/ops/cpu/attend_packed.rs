//! `attend_packed` on the host.

use kvweave_core::ops::AttendPacked;
use pyo3::prelude::*;

use super::element::{run, with_element};
use super::reading::Attention;
use crate::arguments::{Table, raised};
use crate::dlpack::borrow;
use crate::dtype::ROWS;
use crate::ops::reading::AttentionArguments;
use crate::packed::PackedFormat;

/// The cache of `arguments` are packed pages of `format`.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, format, entry_offsets, out, lse, reference))]
pub fn attend_packed(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    format: &Bound<'_, PackedFormat>,
    entry_offsets: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    reference: bool,
) -> PyResult<()> {
    let call = Attention::of(py, &arguments)?;
    let entry_offsets = Table::of("entry_offsets", entry_offsets)?;
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    with_element!(py, ("q", ROWS), call.q.tensor.dtype, T => {
        let params = || {
            let (queries, kv) = (call.queries::<T>()?, call.packed(format.get())?);
            let (out, lse) = call.results(&out.tensor, &lse.tensor)?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            Ok(AttendPacked { queries, kv, scoring: call.scoring, entry_offsets, out, lse })
        };
        run!(py, reference, attend_packed, raised(py, params())?)
    })
}
