//! What `attend_prefill`, `attend_decode` and `attend_packed` have in common on CUDA.

use kvweave_core::ops::check_offsets;
use kvweave_cuda::{
    AttendLaunch, AttendPlan, AttendWorkspace, CudaBackend, DeviceBases, DeviceTensor, PackedPlan,
};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, TablePair};
use super::bases::{BasesThere, placed};
use super::device::backend;
use super::reading::{Call, Reading};
use super::workspace::{Needs, Space, Workspace, room};
use crate::arguments::raised;
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::ops::reading::AttentionArguments;
use crate::packed::PackedFormat;
use crate::tensor::TensorRef;

type Any<'py> = Bound<'py, PyAny>;
/// `out` and `lse`.
pub type Results<'py> = (Any<'py>, Any<'py>);

/// What packed pages are.
pub struct PackedPages<'a, 'py> {
    pub format: &'a PackedFormat,
    pub bases: Option<BasesThere<'py>>,
}

/// Launches, or says what workspace the call needs where it was given none or one that is too
/// small. Without `row_offsets` row b is request b: a decode step. With `packed` the cache are
/// such pages.
pub fn attend<'py>(
    py: Python<'py>,
    (arguments, packed): (&AttentionArguments<'py>, Option<&PackedPages<'_, 'py>>),
    (row_offsets, entry_offsets): (Option<&DeviceTable<'py>>, &TablePair<'py>),
    results: &Results<'py>,
    workspace: Option<Workspace<'py>>,
    stream: u64,
) -> PyResult<Option<Needs>> {
    let reading = Reading::of(py, arguments, entry_offsets)?;
    let (out, lse) = (borrow("out", &results.0)?, borrow("lse", &results.1)?);
    let space = workspace.map(Space::of).transpose()?;
    let checks = || {
        let call = packed.map_or_else(|| reading.call(), |of| reading.call_packed(of.format))?;
        let bases = packed.map_or(Ok((None, None)), |of| {
            placed(of.bases.as_ref(), &call.place, &of.format.format, reading.packed_pages())
        })?;
        let (out, written) = (&out.tensor, &lse.tensor);
        let vectors = &call.vectors;
        let [r, h, d] = [("R", vectors.rows), ("H", vectors.heads), ("D", vectors.head_dim)]
            .map(|(name, size)| (name, Some(size)));
        let [q, positions, entries, offsets, cache] = reading.read();
        let read = [q, positions, entries, offsets, cache, ("lse", written)];
        let element = DType::from(call.place.row_dtype);
        let values = call.place.output("out", out, (element, &[r, h, d]), &read)?;
        let lse = call.place.output("lse", written, (DType::F32, &[r, h]), &read[..5])?;
        expect_apart(packed, [("out", out), ("lse", written)])?;
        let rows = Rows::of(&call, row_offsets)?;
        Ok((call, bases, rows, (values, lse)))
    };
    let (call, (bases, checked), rows, (out, lse)) = raised(py, checks())?;
    let format = packed.map(|of| of.format.format);
    let (backend, kept) = call_core(py, || {
        call.validate(format.as_ref().zip(checked.as_ref()))?;
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
    let plan = raised(py, Planned::of(&backend, &launch, packed.zip(Some(bases))))?;
    let AttendWorkspace { floats, counters } = plan.workspace();
    match raised(py, room(space.as_ref(), &call.place, (floats, counters)))? {
        Some(parts) => (launch.floats, launch.counters) = parts,
        None => return Ok(Some((floats, counters))),
    }
    // SAFETY: every tensor was read from a live owner on this device, which torch keeps until the
    // stream has passed; tables that are kept live as long as their owners. Offsets were checked
    // on the host, or are the caller's promise where they lie on the device.
    call_core(py, || unsafe { plan.carry_out(&backend, &launch) })?;
    Ok(None)
}

/// Refuses results that share memory with bases.
fn expect_apart(
    packed: Option<&PackedPages<'_, '_>>,
    written: [(&str, &TensorRef); 2],
) -> Result<(), Failure> {
    let Some(bases) = packed.and_then(|packed| packed.bases.as_ref()) else { return Ok(()) };
    written.iter().try_for_each(|(what, tensor)| bases.expect_apart(what, tensor))
}

/// The plan of a call, whatever its pages are.
enum Planned {
    Exact(AttendPlan),
    Packed(PackedPlan, Option<DeviceBases>),
}

impl Planned {
    fn of(
        backend: &CudaBackend,
        launch: &AttendLaunch<'_>,
        packed: Option<(&PackedPages<'_, '_>, Option<DeviceBases>)>,
    ) -> Result<Self, Failure> {
        let Some((of, bases)) = packed else {
            return Ok(Self::Exact(backend.plan_attend(launch)));
        };
        Ok(Self::Packed(backend.plan_packed(launch, &of.format.format)?, bases))
    }

    fn workspace(&self) -> AttendWorkspace {
        match self {
            Self::Exact(plan) => plan.workspace(),
            Self::Packed(plan, _) => plan.workspace(),
        }
    }

    /// # Safety
    /// As for `CudaBackend::attend`, with the plan of the call.
    unsafe fn carry_out(
        &self,
        backend: &CudaBackend,
        launch: &AttendLaunch<'_>,
    ) -> Result<(), Failure> {
        // SAFETY: the caller's promise.
        let done = unsafe {
            match self {
                Self::Exact(plan) => backend.attend(launch, plan),
                Self::Packed(plan, bases) => backend.attend_packed(launch, plan, bases.as_ref()),
            }
        };
        done.map_err(Failure::from)
    }
}

/// How rows belong to requests.
struct Rows<'a> {
    offsets: Option<DeviceTensor>,
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
