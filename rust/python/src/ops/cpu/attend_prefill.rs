//! `attend_prefill` on the host.

use kvweave_core::ops::AttendPrefill;
use pyo3::prelude::*;

use super::element::{run, with_rows};
use super::reading::{Attention, Offsets};
use crate::arguments::raised;
use crate::dlpack::borrow;
use crate::ops::reading::AttentionArguments;

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, row_offsets, entry_offsets, out, lse, reference))]
pub fn attend_prefill(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    row_offsets: Option<&Bound<'_, PyAny>>,
    entry_offsets: Option<&Bound<'_, PyAny>>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    reference: bool,
) -> PyResult<()> {
    let call = Attention::of(py, &arguments)?;
    let row_offsets = Offsets::of("row_offsets", row_offsets, &call.positions)?;
    let entry_offsets = Offsets::of("entry_offsets", entry_offsets, &call.entries)?;
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    with_rows!(py, call.cache.tensor.dtype, ("q", call.q.tensor.dtype), (T, C) => {
        let params = || {
            let (queries, kv) = (call.queries::<T>()?, call.kv::<C>()?);
            let (out, lse) = call.results(&out.tensor, &lse.tensor)?;
            let row_offsets = row_offsets.list("row_offsets")?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            let scoring = call.scoring;
            Ok(AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse })
        };
        run!(py, reference, attend_prefill, raised(py, params())?)
    })
}
