//! `gather_entries` on CUDA.

use kvweave_core::ops::validate_gathered;
use kvweave_cuda::{DeviceReach, GatherEntriesLaunch, KeptPages};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, TablePair, extent_of, ordinal_of};
use super::device::backend;
use crate::arguments::raised;
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::reach::Reach;
use crate::tensor::TensorRef;

/// `chosen` are the pages and how many were selected, `tables` the entries that they are of and
/// where each table's begin; `results` are entries and offsets; `kept` is what rows of requests
/// selected last, written in place, whose each request's are, and whether they go on with that.
/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (chosen, tables, reach, results, kept, stream))]
pub fn gather_entries_cuda(
    py: Python<'_>,
    chosen: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    tables: (TablePair<'_>, TablePair<'_>),
    reach: Option<&Bound<'_, Reach>>,
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    kept: Option<(Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>)>,
    stream: u64,
) -> PyResult<()> {
    let (pages, selected) = (borrow("pages", &chosen.0)?, borrow("selected", &chosen.1)?);
    let (entries, ends) =
        (DeviceTable::of("entries", &tables.0)?, DeviceTable::of("entry_offsets", &tables.1)?);
    let (gathered, offsets) = (borrow("gathered", &results.0)?, borrow("offsets", &results.1)?);
    let reach = reach.map(Bound::get);
    let tensors = [
        ("pages", &pages.tensor),
        ("selected", &selected.tensor),
        ("entries", &entries.on_device.tensor),
        ("entry_offsets", &ends.on_device.tensor),
        ("offsets", &offsets.tensor),
        ("gathered", &gathered.tensor),
    ];
    let kept = match &kept {
        None => None,
        Some((pages, of, again)) => {
            Some([borrow("kept", pages)?, borrow("rows", of)?, borrow("again", again)?])
        }
    };
    let checks = || {
        let launch = launch_of(&tensors, stream)?;
        let kept = kept.as_ref().map(|kept| kept_of(&tensors, &launch, kept)).transpose()?;
        Ok((ordinal_of("pages", &pages.tensor)?, GatherEntriesLaunch { kept, ..launch }))
    };
    let (ordinal, launch) = raised(py, checks())?;
    let ends = ends.on_device.tensor.shape()[0];
    call_core(py, || {
        let sizes = (launch.requests, launch.kv_heads, launch.most);
        validate_gathered(sizes, ends, reach.map(Reach::core))?;
        let backend = backend(ordinal)?;
        let heads = reach.map(|reach| reach.on(&backend, ordinal)).transpose()?;
        let tables = reach.map_or(1, Reach::tables);
        let reach = heads.as_deref().map(|heads| DeviceReach { tables, heads });
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed; tables that are kept live as long as their owners. Offsets are
        // the caller's promise.
        unsafe { backend.gather_entries(&GatherEntriesLaunch { reach, ..launch }) }
            .map_err(Failure::from)
    })
}

/// The launch over pages, selected, entries, their offsets, and both results, offsets first.
fn launch_of<'a>(
    tensors: &[(&str, &TensorRef); 6],
    stream: u64,
) -> Result<GatherEntriesLaunch<'a>, Failure> {
    let (_, pages) = tensors[0];
    pages.expect_shape("pages", &[("B", None), ("G", None), ("K", None)])?;
    let &[requests, kv_heads, most] = pages.shape() else {
        return Err(Failure::invalid("pages", "3 axes", pages.axes));
    };
    let rows = requests.saturating_mul(kv_heads);
    let shapes: [&[(&str, Option<usize>)]; 6] = [
        &[("B", None), ("G", None), ("K", None)],
        &[("B", Some(requests)), ("G", Some(kv_heads))],
        &[("N", None), ("columns", Some(5))],
        &[("ends", None)],
        &[("ends", Some(rows.saturating_mul(2).saturating_add(1)))],
        &[("N", Some(rows.saturating_mul(most))), ("columns", Some(5))],
    ];
    for (&(what, tensor), shape) in tensors.iter().zip(shapes) {
        expect_numbers(what, tensor, pages, shape)?;
    }
    for written in 4..tensors.len() {
        let (what, tensor) = tensors[written];
        tensor.expect_writable(what)?;
        let mut others = tensors[..written].iter().copied();
        others.try_for_each(|(name, other)| tensor.expect_apart(what, other, name))?;
    }
    let at = |number: usize| extent_of(tensors[number].0, tensors[number].1);
    Ok(GatherEntriesLaunch {
        pages: at(0)?,
        selected: at(1)?,
        requests,
        kv_heads,
        most,
        entries: at(2)?,
        entry_offsets: at(3)?,
        reach: None,
        gathered: at(5)?,
        offsets: at(4)?,
        kept: None,
        stream,
    })
}

/// What is kept of pages, beside the tensors of a launch.
fn kept_of(
    tensors: &[(&str, &TensorRef); 6],
    launch: &GatherEntriesLaunch<'_>,
    [kept, of, again]: &[Borrowed<'_>; 3],
) -> Result<KeptPages, Failure> {
    let (_, pages) = tensors[0];
    let (kept, of, again) = (&kept.tensor, &of.tensor, &again.tensor);
    let GatherEntriesLaunch { requests, kv_heads, most, .. } = *launch;
    let shape = [("N", None), ("G", Some(kv_heads)), ("K", Some(most))];
    expect_numbers("kept", kept, pages, &shape)?;
    expect_numbers("rows", of, pages, &[("B", Some(requests))])?;
    again.expect_dtype("again", DType::U8)?;
    again.expect_device("again", pages.device)?;
    again.expect_shape("again", &[("B", Some(requests))])?;
    again.expect_contiguous("again")?;
    kept.expect_writable("kept")?;
    let others = tensors.iter().copied().chain([("rows", of), ("again", again)]);
    others.into_iter().try_for_each(|(name, other)| kept.expect_apart("kept", other, name))?;
    Ok(KeptPages {
        pages: extent_of("kept", kept)?,
        rows: kept.shape()[0],
        of: extent_of("rows", of)?,
        again: extent_of("again", again)?,
    })
}

/// Refuses what is no contiguous i32 of a shape beside `pages`.
fn expect_numbers(
    what: &str,
    tensor: &TensorRef,
    pages: &TensorRef,
    shape: &[(&str, Option<usize>)],
) -> Result<(), Failure> {
    tensor.expect_dtype(what, DType::I32)?;
    tensor.expect_device(what, pages.device)?;
    tensor.expect_aligned(what, DType::I32.bytes())?;
    tensor.expect_shape(what, shape)?;
    tensor.expect_contiguous(what)
}
