//! `recycle_pages` on CUDA.

use kvweave_core::ops::RecyclePages;
use kvweave_cuda::{DeviceTensor, RecyclePagesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair, extent_of};
use super::device::backend;
use super::workspace::{Needs, Space, Workspace, room as room_of};
use crate::arguments::{count, raised};
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::scalars::Number;
use crate::tensor::TensorRef;

type Any<'py> = Bound<'py, PyAny>;
/// Axes by name, and their sizes where they are known.
type Shape<'a> = &'a [(&'static str, Option<usize>)];

/// Returns nothing when it has launched, or else what the call needs of `workspace`, in numbers of
/// f32 and i32: it was given none, or one that is too small.
///
/// `chosen` are the pages and how many were selected; `room` are the slots, written in place, and
/// which of them are pinned; `results` are places, moves, their count, and what was refused.
/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (chosen, limit, room, results, workspace, stream))]
pub fn recycle_pages_cuda(
    py: Python<'_>,
    chosen: (TablePair<'_>, TablePair<'_>),
    limit: Number,
    room: (Any<'_>, Option<Any<'_>>),
    results: (Any<'_>, Any<'_>, Any<'_>, Any<'_>),
    workspace: Option<Workspace<'_>>,
    stream: u64,
) -> PyResult<Option<Needs>> {
    let (pages, selected) =
        (DeviceTable::of("pages", &chosen.0)?, DeviceTable::of("selected", &chosen.1)?);
    let slots = borrow("slots", &room.0)?;
    let pinned = room.1.as_ref().map(|pinned| borrow("pinned", pinned)).transpose()?;
    let (places, moves) = (borrow("places", &results.0)?, borrow("moves", &results.1)?);
    let (moved, refused) = (borrow("count", &results.2)?, borrow("refused", &results.3)?);
    let space = workspace.map(Space::of).transpose()?;
    let tensors = Tensors {
        slots: &slots.tensor,
        pinned: pinned.as_ref().map(|pinned| &pinned.tensor),
        results: [&places.tensor, &moves.tensor, &moved.tensor, &refused.tensor],
    };
    let checks = || {
        let launch = launch_of((&pages, &selected), &tensors, (count("limit", limit)?, stream))?;
        let most = launch.1.most;
        let on_host = (pages.wide_on_host("pages", most)?, selected.list_on_host("selected")?);
        Ok((launch, on_host))
    };
    let ((place, launch), on_host) = raised(py, checks())?;
    call_core(py, || {
        RecyclePages::most_moves(launch.rows, launch.most, launch.width, launch.limit)?;
        if let (Some(pages), Some(selected)) = on_host {
            RecyclePages::check_selection((pages, launch.most), selected, launch.limit)?;
        }
        Ok::<_, Failure>(())
    })?;
    launched(py, &place, launch, space.as_ref())
}

/// Puts a call on its stream, if `space` is enough for it; else returns what it needs.
pub fn launched(
    py: Python<'_>,
    place: &Place,
    mut launch: RecyclePagesLaunch,
    space: Option<&Space<'_>>,
) -> PyResult<Option<Needs>> {
    let (backend, plan) = call_core(py, || {
        let backend = backend(place.ordinal)?;
        let plan = backend.plan_recycle(&launch)?;
        Ok::<_, Failure>((backend, plan))
    })?;
    let needs = (0, plan.counters());
    let Some((_, counters)) = raised(py, room_of(space, place, needs))? else {
        return Ok(Some(needs));
    };
    launch.counters = counters;
    call_core(py, || {
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed. That counters are 0 and no other call's is the caller's promise.
        unsafe { backend.recycle_pages(&launch, &plan) }.map_err(Failure::from)
    })?;
    Ok(None)
}

/// What lies on the device beside the tables.
struct Tensors<'a> {
    slots: &'a TensorRef,
    pinned: Option<&'a TensorRef>,
    /// Places, moves, their count, and what was refused.
    results: [&'a TensorRef; 4],
}

fn launch_of(
    (pages, selected): (&DeviceTable<'_>, &DeviceTable<'_>),
    tensors: &Tensors<'_>,
    (limit, stream): (usize, u64),
) -> Result<(Place, RecyclePagesLaunch), Failure> {
    let slots = tensors.slots;
    let place = Place::of_numbers("slots", slots)?;
    slots.expect_shape("slots", &[("R", None), ("S", None)])?;
    let (rows, width) = (slots.shape()[0], slots.shape()[1]);
    let (of_pages, of_selected) = (&pages.on_device.tensor, &selected.on_device.tensor);
    of_pages.expect_shape("pages", &[("R", Some(rows)), ("K", None)])?;
    of_selected.expect_shape("selected", &[("R", Some(rows))])?;
    let most = of_pages.shape()[1];
    let mut read = vec![("pages", of_pages), ("selected", of_selected)];
    let pinned = match tensors.pinned {
        None => None,
        Some(pinned) => {
            place.expect("pinned", pinned, DType::U8)?;
            pinned.expect_shape("pinned", &[("R", Some(rows)), ("S", Some(width))])?;
            pinned.expect_contiguous("pinned")?;
            read.push(("pinned", pinned));
            Some(extent_of("pinned", pinned)?)
        }
    };
    let of_rows = ("R", Some(rows));
    let shapes: [(&str, &TensorRef, Shape<'_>); 5] = [
        ("slots", slots, &[of_rows, ("S", None)]),
        ("places", tensors.results[0], &[of_rows, ("K", Some(most))]),
        ("moves", tensors.results[1], &[("M", None), ("columns", Some(3))]),
        ("count", tensors.results[2], &[("1", Some(1))]),
        ("refused", tensors.results[3], &[of_rows]),
    ];
    let nothing = DeviceTensor { address: 0, len: 0 };
    let mut written = [nothing; 5];
    for (written, (what, tensor, shape)) in written.iter_mut().zip(shapes) {
        *written = place.output(what, tensor, (DType::I32, shape), &read)?;
        read.push((what, tensor));
    }
    let [slots, places, moves, count, refused] = written;
    let launch = RecyclePagesLaunch {
        pages: pages.wide("pages", &place, most)?.0,
        most,
        selected: selected.list("selected", &place)?.0,
        rows,
        limit,
        pinned,
        slots,
        width,
        places,
        moves,
        count,
        refused,
        counters: nothing,
        seats: None,
        stream,
    };
    Ok((place, launch))
}
