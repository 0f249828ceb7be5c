//! `attend_decode` on the host.

use kvweave_core::ops::AttendDecode;
use pyo3::prelude::*;

use super::element::{run, with_rows};
use super::reading::Attention;
use crate::arguments::{Table, raised};
use crate::dlpack::borrow;
use crate::ops::reading::AttentionArguments;

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, entry_offsets, out, lse, reference))]
pub fn attend_decode(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    entry_offsets: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    reference: bool,
) -> PyResult<()> {
    let call = Attention::of(py, &arguments)?;
    let entry_offsets = Table::of("entry_offsets", entry_offsets)?;
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    with_rows!(py, call.cache.tensor.dtype, ("q", call.q.tensor.dtype), (T, C) => {
        let params = || {
            let (queries, kv) = (call.queries::<T>()?, call.kv::<C>()?);
            let (out, lse) = call.results(&out.tensor, &lse.tensor)?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            Ok(AttendDecode { queries, kv, scoring: call.scoring, entry_offsets, out, lse })
        };
        run!(py, reference, attend_decode, raised(py, params())?)
    })
}
