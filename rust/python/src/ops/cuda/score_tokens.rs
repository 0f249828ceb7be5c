//! `score_tokens` on CUDA.

use kvweave_cuda::{DeviceTensor, EdgeLaunch, ScoreTokensLaunch};
use pyo3::prelude::*;

use super::arguments::TablePair;
use super::device::backend;
use super::reading::{Call, Reading};
use super::workspace::{Needs, Space, Workspace, room};
use crate::arguments::raised;
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::ops::reading::{AttentionArguments, EdgeArguments, keys};
use crate::tensor::TensorRef;

/// Returns nothing when it has launched, or else what the call needs of `workspace`, in numbers of
/// f32 and i32: it was given none, or one that is too small. `stream` is the handle of the stream
/// to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, entry_offsets, mass, edge, workspace, stream))]
pub fn score_tokens_cuda(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    entry_offsets: TablePair<'_>,
    mass: &Bound<'_, PyAny>,
    edge: Option<EdgeArguments<'_>>,
    workspace: Option<Workspace<'_>>,
    stream: u64,
) -> PyResult<Option<Needs>> {
    let reading = Reading::of(py, &arguments, &entry_offsets)?;
    let mass = borrow("mass", mass)?;
    let space = workspace.map(Space::of).transpose()?;
    let share = edge.as_ref().map(|(share, ..)| borrow("edge", share)).transpose()?;
    let checks = || {
        let call = reading.call()?;
        let mut read = reading.read().to_vec();
        let shape = [("T", call.last_end())];
        let sums = call.place.output("mass", &mass.tensor, (DType::F32, &shape), &read)?;
        read.push(("mass", &mass.tensor));
        let edge = match (&share, &edge) {
            (Some(share), Some((_, window, sink))) => {
                let (window, sink) = (keys("window of edge", window)?, keys("sink of edge", sink)?);
                let share = share_of(&call, &share.tensor, &read)?;
                Some(EdgeLaunch { window, sink, share })
            }
            _ => None,
        };
        if call.requests != 1 {
            let got = format!("those of {} requests", call.requests);
            return Err(Failure::invalid("entry_offsets", "those of one request", got));
        }
        Ok((call, sums, edge))
    };
    let (call, mass, edge) = raised(py, checks())?;
    let (backend, kept) = call_core(py, || {
        call.validate(None)?;
        let backend = backend(call.place.ordinal)?;
        let kept = call.kept_tables(&backend)?;
        Ok::<_, Failure>((backend, kept))
    })?;
    let mut launch = ScoreTokensLaunch {
        kv: call.kv(&kept),
        q: call.q,
        dtype: call.place.row_dtype,
        positions: call.positions,
        mass,
        edge,
        workspace: DeviceTensor { address: 0, len: 0 },
        scale: call.scoring.scale,
        softcap: call.scoring.softcap,
        rows: call.vectors.rows,
        query_heads: call.vectors.heads,
        stream,
    };
    let plan = raised(py, backend.plan_score_tokens(&launch).map_err(Failure::from))?;
    let needs = (plan.workspace_bytes().div_ceil(size_of::<f32>()), 0);
    let parts = raised(py, room(space.as_ref(), &call.place, needs))?;
    let Some((floats, _)) = parts else { return Ok(Some(needs)) };
    launch.workspace = DeviceTensor { len: floats.len * size_of::<f32>(), ..floats };
    call_core(py, || {
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed; tables that are kept live as long as their owners. Offsets were
        // checked on the host, or are the caller's promise where they lie on the device.
        unsafe { backend.score_tokens(&launch, &plan) }.map_err(Failure::from)
    })?;
    Ok(None)
}

fn share_of(
    call: &Call<'_>,
    share: &TensorRef,
    read: &[(&str, &TensorRef)],
) -> Result<DeviceTensor, Failure> {
    let shape = [("R", Some(call.vectors.rows)), ("H", Some(call.vectors.heads))];
    call.place.output("edge", share, (DType::F32, &shape), read)
}
