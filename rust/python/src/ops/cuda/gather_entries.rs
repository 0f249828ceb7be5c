//! `gather_entries` on CUDA.

use kvweave_core::ops::validate_gathered;
use kvweave_cuda::{DeviceReach, GatherEntriesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, TablePair, extent_of, ordinal_of};
use super::device::backend;
use crate::arguments::raised;
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::reach::Reach;
use crate::tensor::TensorRef;

/// `chosen` are the pages and how many were selected; `results` are entries and offsets. `stream`
/// is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (chosen, entries, entry_offsets, reach, results, stream))]
pub fn gather_entries_cuda(
    py: Python<'_>,
    chosen: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    entries: TablePair<'_>,
    entry_offsets: TablePair<'_>,
    reach: Option<&Bound<'_, Reach>>,
    results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    stream: u64,
) -> PyResult<()> {
    let (pages, selected) = (borrow("pages", &chosen.0)?, borrow("selected", &chosen.1)?);
    let (entries, ends) =
        (DeviceTable::of("entries", &entries)?, DeviceTable::of("entry_offsets", &entry_offsets)?);
    let (gathered, offsets) = (borrow("gathered", &results.0)?, borrow("offsets", &results.1)?);
    let reach = reach.map(Bound::get);
    let checks = || {
        let tensors = [
            ("pages", &pages.tensor),
            ("selected", &selected.tensor),
            ("entries", &entries.on_device.tensor),
            ("entry_offsets", &ends.on_device.tensor),
            ("offsets", &offsets.tensor),
            ("gathered", &gathered.tensor),
        ];
        pages.tensor.expect_shape("pages", &[("B", None), ("G", None), ("K", None)])?;
        let &[requests, kv_heads, most] = pages.tensor.shape() else {
            return Err(Failure::invalid("pages", "3 axes", pages.tensor.axes));
        };
        let ordinal = ordinal_of("pages", &pages.tensor)?;
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
            expect_numbers(what, tensor, &pages.tensor, shape)?;
        }
        for written in 4..tensors.len() {
            let (what, tensor) = tensors[written];
            tensor.expect_writable(what)?;
            let others = tensors[..written].iter();
            others.copied().try_for_each(|(name, other)| tensor.expect_apart(what, other, name))?;
        }
        let at = |number: usize| extent_of(tensors[number].0, tensors[number].1);
        let launch = GatherEntriesLaunch {
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
            stream,
        };
        Ok((ordinal, launch, ends.on_device.tensor.shape()[0]))
    };
    let (ordinal, launch, ends) = raised(py, checks())?;
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
