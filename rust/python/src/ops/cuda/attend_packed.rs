//! `attend_packed` on CUDA.

use pyo3::prelude::*;

use super::arguments::TablePair;
use super::attend::{PackedPages, Results, attend};
use super::bases::{BasesThere, GivenBases};
use super::workspace::{Needs, Workspace};
use crate::ops::reading::AttentionArguments;
use crate::packed::PackedFormat;

/// As `attend_decode_cuda`; the cache of `arguments` are packed pages of `format`.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's arguments")]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, format, bases, entry_offsets, results, workspace, stream))]
pub fn attend_packed_cuda<'py>(
    py: Python<'py>,
    arguments: AttentionArguments<'py>,
    format: &Bound<'py, PackedFormat>,
    bases: GivenBases<'py>,
    entry_offsets: TablePair<'py>,
    results: Results<'py>,
    workspace: Option<Workspace<'py>>,
    stream: u64,
) -> PyResult<Option<Needs>> {
    let packed = PackedPages { format: format.get(), bases: BasesThere::of(&bases)? };
    let call = (&arguments, Some(&packed));
    attend(py, call, (None, &entry_offsets), &results, workspace, stream)
}
