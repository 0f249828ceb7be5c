//! `attend_prefill` on CUDA.

use pyo3::prelude::*;

use super::arguments::{DeviceTable, TablePair};
use super::attend::{Results, attend};
use super::workspace::{Needs, Workspace};
use crate::ops::reading::AttentionArguments;

/// Returns nothing when it has launched, or else what the call needs of `workspace`, in numbers of
/// f32 and i32: it was given none, or one that is too small. `workspace` are two tensors on the
/// cache's device, the second one all 0. `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, row_offsets, entry_offsets, results, workspace, stream))]
pub fn attend_prefill_cuda<'py>(
    py: Python<'py>,
    arguments: AttentionArguments<'py>,
    row_offsets: TablePair<'py>,
    entry_offsets: TablePair<'py>,
    results: Results<'py>,
    workspace: Option<Workspace<'py>>,
    stream: u64,
) -> PyResult<Option<Needs>> {
    let row_offsets = DeviceTable::of("row_offsets", &row_offsets)?;
    let offsets = (Some(&row_offsets), &entry_offsets);
    attend(py, (&arguments, None), offsets, &results, workspace, stream)
}
