//! `attend_prefill` and `attend_decode` on CUDA.

use kvweave_core::ops::check_offsets;
use kvweave_cuda::{AttendLaunch, AttendWorkspace, DeviceTensor};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, TablePair};
use super::device::backend;
use super::reading::{Call, Reading};
use crate::arguments::raised;
use crate::attention::AttentionArguments;
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::tensor::TensorRef;

/// Without `row_offsets` row b is request b: a decode step. `results` are `out` and `lse`.
/// `allocate` is called at most once, with the workspace's numbers of f32 and i32, and returns two
/// tensors of at least as many on the cache's device, the second one all 0. `stream` is the handle
/// of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, row_offsets, entry_offsets, results, allocate, stream))]
pub fn attend_cuda(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    row_offsets: Option<TablePair<'_>>,
    entry_offsets: TablePair<'_>,
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    allocate: &Bound<'_, PyAny>,
    stream: u64,
) -> PyResult<()> {
    let reading = Reading::of(py, &arguments, &entry_offsets)?;
    let row_offsets = row_offsets.map(|pair| DeviceTable::of("row_offsets", &pair)).transpose()?;
    let (out, lse) = (borrow("out", &results.0)?, borrow("lse", &results.1)?);
    let checks = || {
        let call = reading.call()?;
        let (out, lse) = (&out.tensor, &lse.tensor);
        let vectors = &call.vectors;
        let [r, h, d] = [("R", vectors.rows), ("H", vectors.heads), ("D", vectors.head_dim)]
            .map(|(name, size)| (name, Some(size)));
        let [q, positions, entries, offsets, cache] = reading.read();
        let read = [q, positions, entries, offsets, cache, ("lse", lse)];
        let element = DType::from(call.place.row_dtype);
        let values = call.place.output("out", out, (element, &[r, h, d]), &read)?;
        let lse = call.place.output("lse", lse, (DType::F32, &[r, h]), &read[..5])?;
        let rows = Rows::of(&call, row_offsets.as_ref())?;
        Ok((call, rows, values, lse))
    };
    let (call, rows, out, lse) = raised(py, checks())?;
    let (backend, kept) = call_core(py, || {
        call.validate()?;
        if let Some(offsets) = rows.on_host {
            check_offsets("row_offsets", offsets, call.vectors.rows)?;
        }
        let backend = backend(call.place.ordinal)?;
        let kept = call.kept_tables(&backend)?;
        Ok::<_, Failure>((backend, kept))
    })?;
    let nothing = DeviceTensor { address: 0, len: 0 };
    let mut launch = AttendLaunch {
        kv: call.kv(&kept),
        q: call.q,
        dtype: call.place.row_dtype,
        positions: call.positions,
        row_offsets: rows.offsets,
        out,
        lse,
        scale: call.scoring.scale,
        softcap: call.scoring.softcap,
        rows: call.vectors.rows,
        requests: call.requests,
        query_heads: call.vectors.heads,
        floats: nothing,
        counters: nothing,
        stream,
    };
    let needs = backend.attend_workspace(&launch);
    let space = if needs.floats > 0 { Some(allocated(allocate, needs)?) } else { None };
    if let Some((floats, counters)) = &space {
        let part = |what, tensor: &TensorRef, dtype| {
            call.place.output(what, tensor, (dtype, &[("numbers", None)]), &[])
        };
        launch.floats = raised(py, part("workspace", &floats.tensor, DType::F32))?;
        launch.counters = raised(py, part("counters", &counters.tensor, DType::I32))?;
    }
    // SAFETY: every tensor was read from a live owner on this device, which torch keeps until the
    // stream has passed; tables that are kept live as long as their owners. Offsets were checked
    // on the host, or are the caller's promise where they lie on the device.
    call_core(py, || unsafe { backend.attend(&launch) }.map_err(Failure::from))
}

fn allocated<'py>(
    allocate: &Bound<'py, PyAny>,
    needs: AttendWorkspace,
) -> PyResult<(Borrowed<'py>, Borrowed<'py>)> {
    let pair = allocate.call1((needs.floats, needs.counters))?;
    let (floats, counters) = pair.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
    Ok((borrow("workspace", &floats)?, borrow("counters", &counters)?))
}

/// How rows belong to requests.
struct Rows<'a> {
    offsets: Option<kvweave_cuda::DeviceTensor>,
    on_host: Option<&'a [i32]>,
}

impl<'a> Rows<'a> {
    fn of(call: &Call<'_>, table: Option<&'a DeviceTable<'_>>) -> Result<Self, Failure> {
        let expected = |count: usize| format!("{count} elements");
        let Some(table) = table else {
            let rows = call.vectors.rows;
            if rows != call.requests {
                return Err(Failure::invalid("q rows", expected(call.requests), rows));
            }
            return Ok(Self { offsets: None, on_host: None });
        };
        let (offsets, ends) = table.list("row_offsets", &call.place)?;
        if ends != call.requests + 1 {
            return Err(Failure::invalid("row_offsets", expected(call.requests + 1), ends));
        }
        Ok(Self { offsets: Some(offsets), on_host: table.list_on_host("row_offsets")? })
    }
}
