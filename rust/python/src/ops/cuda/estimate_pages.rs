//! `estimate_pages` on CUDA.

use kvweave_core::ops::{
    HeadRows, KvScales, KvView, OpError, Queries, ReadEntries, validate_estimated,
};
use kvweave_cuda::{DeviceReach, EstimatePagesLaunch, EstimatePlan};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of, nothing, row_dtype};
use super::device::backend;
use super::workspace::{Needs, Space, Workspace, room};
use crate::arguments::{count, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::ops::page_means::PageMeans;
use crate::reach::Reach;

type Any<'py> = Bound<'py, PyAny>;
/// Entries and offsets.
type Tables<'a> = (&'a [[i32; 5]], &'a [i32]);

/// Bytes that a load of means takes.
const LOAD_BYTES: usize = 16;

/// Returns nothing when it has launched, or else what the call needs of `workspace`, in numbers of
/// f32 and i32: it was given none, or one that is too small.
///
/// `attended` and `results` are attention and its log-sum-exp; `listed` and `read` are entries and
/// their offsets, the latter with their reach. `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[expect(clippy::too_many_arguments, reason = "tensors by their part in the call")]
#[pyo3(signature = (q, attended, listed, pages, read, results, workspace, stream))]
pub fn estimate_pages_cuda(
    py: Python<'_>,
    q: &Any<'_>,
    attended: (Any<'_>, Any<'_>),
    listed: (TablePair<'_>, TablePair<'_>),
    pages: PageMeans<'_>,
    read: (TablePair<'_>, TablePair<'_>, Option<Bound<'_, Reach>>),
    results: (Any<'_>, Any<'_>),
    workspace: Option<Workspace<'_>>,
    stream: u64,
) -> PyResult<Option<Needs>> {
    let tensors = Tensors {
        q: borrow("q", q)?,
        attended: borrow("attended", &attended.0)?,
        attended_lse: borrow("lse of attended", &attended.1)?,
        means: borrow("means", &pages.means)?,
        entries: DeviceTable::of("entries", &listed.0)?,
        offsets: DeviceTable::of("entry_offsets", &listed.1)?,
        read: DeviceTable::of("read", &read.0)?,
        read_offsets: DeviceTable::of("read_offsets", &read.1)?,
        out: borrow("out", &results.0)?,
        lse: borrow("lse", &results.1)?,
    };
    let space = workspace.map(Space::of).transpose()?;
    let (of_pages, of_read) = (pages.reach.as_ref().map(Py::get), read.2.as_ref().map(Bound::get));
    let ordinal = raised(py, Place::of("q", &tensors.q.tensor))?.ordinal;
    let backend = call_core(py, || backend(ordinal))?;
    let inv_freq = pages.rope.get();
    let kept = call_core(py, || {
        let heads = of_pages.map(|reach| reach.on(&backend, ordinal)).transpose()?;
        let read = of_read.map(|reach| reach.on(&backend, ordinal)).transpose()?;
        Ok::<_, Failure>((inv_freq.on(&backend, ordinal)?, heads, read))
    })?;
    let tables = |reach: Option<&Reach>| reach.map_or(1, Reach::tables);
    let reach = kept.1.as_deref().map(|heads| DeviceReach { tables: tables(of_pages), heads });
    let read_reach = kept.2.as_deref().map(|heads| DeviceReach { tables: tables(of_read), heads });
    let checks = || {
        let (place, launch) = tensors.launch(&pages, &kept.0, stream)?;
        let mut launch = EstimatePagesLaunch { reach, read_reach, ..launch };
        tensors.validate(&pages, &launch, of_read)?;
        let plan = EstimatePlan::of(&launch)?;
        let needs = (plan.floats(), plan.counters());
        let Some(parts) = room(space.as_ref(), &place, needs)? else { return Ok(Err(needs)) };
        (launch.floats, launch.counters) = parts;
        Ok(Ok((launch, plan)))
    };
    let (launch, plan) = match raised(py, checks())? {
        Ok(ready) => ready,
        Err(needs) => return Ok(Some(needs)),
    };
    call_core(py, || {
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed; tables that are kept live as long as their owners. Offsets were
        // checked on the host, or are the caller's promise where they lie on the device, as it is
        // that counters are 0 and no other call's.
        unsafe { backend.estimate_pages(&launch, &plan) }.map_err(Failure::from)
    })?;
    Ok(None)
}

/// The tensors of a call, borrowed.
struct Tensors<'py> {
    q: Borrowed<'py>,
    attended: Borrowed<'py>,
    attended_lse: Borrowed<'py>,
    means: Borrowed<'py>,
    entries: DeviceTable<'py>,
    offsets: DeviceTable<'py>,
    read: DeviceTable<'py>,
    read_offsets: DeviceTable<'py>,
    out: Borrowed<'py>,
    lse: Borrowed<'py>,
}

impl Tensors<'_> {
    /// The launch but for reaches and workspace.
    fn launch<'a>(
        &self,
        pages: &'a PageMeans<'_>,
        inv_freq: &'a kvweave_cuda::DeviceBuffer,
        stream: u64,
    ) -> Result<(Place, EstimatePagesLaunch<'a>), Failure> {
        let (q, means) = (&self.q.tensor, &self.means.tensor);
        let (attended, sums) = (&self.attended.tensor, &self.attended_lse.tensor);
        let (dtype, place) = (row_dtype("q", q)?, Place::of("q", q)?);
        let (rows, vectors) = place.rows("q", q)?;
        let geometry = pages.geometry(means)?;
        place.expect("means", means, dtype.into())?;
        means.expect_aligned("means", LOAD_BYTES)?;
        let shape = [("B", vectors.rows), ("H", vectors.heads), ("D", geometry.head_dim)];
        let shape = shape.map(|(name, size)| (name, Some(size)));
        place.expect("attended", attended, dtype.into())?;
        attended.expect_shape("attended", &shape)?;
        attended.expect_contiguous("attended")?;
        place.expect("lse of attended", sums, DType::F32)?;
        sums.expect_shape("lse of attended", &shape[..2])?;
        sums.expect_contiguous("lse of attended")?;
        let mut read = vec![
            ("q", q),
            ("means", means),
            ("attended", attended),
            ("lse of attended", sums),
            ("entries", &self.entries.on_device.tensor),
            ("entry_offsets", &self.offsets.on_device.tensor),
            ("read", &self.read.on_device.tensor),
            ("read_offsets", &self.read_offsets.on_device.tensor),
        ];
        let lse = place.output("lse", &self.lse.tensor, (DType::F32, &shape[..2]), &read)?;
        read.push(("lse", &self.lse.tensor));
        let out = place.output("out", &self.out.tensor, (dtype.into(), &shape), &read)?;
        let absent = kvweave_cuda::DeviceTensor { address: 0, len: 0 };
        let rope = &pages.rope.get().table;
        let launch = EstimatePagesLaunch {
            q: rows,
            dtype,
            requests: vectors.rows,
            query_heads: vectors.heads,
            kv_heads: geometry.kv_heads,
            head_dim: geometry.head_dim,
            attended: extent_of("attended", attended)?,
            attended_lse: extent_of("lse of attended", sums)?,
            means: extent_of("means", means)?,
            entries: self.entries.rows::<5>("entries", &place)?.0,
            entry_offsets: self.offsets.list("entry_offsets", &place)?.0,
            reach: None,
            read: self.read.rows::<5>("read", &place)?.0,
            read_offsets: self.read_offsets.list("read_offsets", &place)?.0,
            read_reach: None,
            layer: count("layer", &pages.layer)?,
            inv_freq,
            pairs: rope.pairs(),
            pairing: rope.pairing(),
            scale: pages.scale,
            softcap: pages.softcap,
            out,
            lse,
            floats: absent,
            counters: absent,
            stream,
        };
        Ok((place, launch))
    }

    /// The core's own checks, as far as tables lie on the host: what is on the device is known by
    /// its shape alone.
    fn validate(
        &self,
        pages: &PageMeans<'_>,
        launch: &EstimatePagesLaunch<'_>,
        read_reach: Option<&Reach>,
    ) -> Result<(), Failure> {
        let reach = pages.reach.as_ref().map(Py::get);
        let of_tables = |offsets: &DeviceTable<'_>, what, reach: Option<&Reach>| {
            let tables = reach.map_or(1, Reach::tables);
            let expected = launch.requests.saturating_mul(tables).saturating_add(1);
            let shape = [("ends", Some(expected))];
            offsets.on_device.tensor.expect_shape(what, &shape)
        };
        of_tables(&self.offsets, "entry_offsets", reach)?;
        of_tables(&self.read_offsets, "read_offsets", read_reach)?;
        let on_host = (self
            .on_host(("entries", "entry_offsets"), (&self.entries, &self.offsets))?)
        .zip(self.on_host(("read", "read_offsets"), (&self.read, &self.read_offsets))?);
        let nowhere: Tables<'_> = (&[], &[0]);
        let ((entries, offsets), (read, read_offsets)) = on_host.unwrap_or((nowhere, nowhere));
        let geometry = pages.geometry(&self.means.tensor)?;
        let means = self.means.tensor.shape()[0];
        // What a page's position among its request's is does not matter for its estimate.
        let positions = vec![0; launch.requests];
        let vectors: HeadRows<'static, ()> =
            Place::of("q", &self.q.tensor)?.rows("q", &self.q.tensor)?.1;
        let kv = KvView {
            // Of the pages themselves only the number is looked at.
            cache: nothing(means.saturating_mul(geometry.block_stride)),
            geometry,
            layer: launch.layer,
            entries,
            reach: reach.map(Reach::core),
            scales: KvScales::ONE,
        };
        let read = ReadEntries {
            entries: read,
            offsets: read_offsets,
            reach: read_reach.map(Reach::core),
        };
        let queries = Queries { vectors, positions: &positions };
        let checked: Result<(), OpError> =
            validate_estimated(&queries, &kv, &pages.scoring(), offsets, &read);
        checked.map_err(Failure::from)
    }

    fn on_host<'a>(
        &self,
        names: (&str, &str),
        (entries, offsets): (&'a DeviceTable<'_>, &'a DeviceTable<'_>),
    ) -> Result<Option<Tables<'a>>, Failure> {
        let entries = entries.rows_on_host(names.0)?;
        Ok(entries.zip(offsets.list_on_host(names.1)?))
    }
}
