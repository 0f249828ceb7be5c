//! `move_pages` on CUDA, to and from pages in e4m3 numbers.

use kvweave_core::ops::Way;
use kvweave_cuda::{DeviceTensor, MoveFp8PagesLaunch};
use pyo3::prelude::*;

use super::arguments::{Place, TablePair};
use super::device::backend;
use super::move_pages::{Side, Steps};
use crate::arguments::{count, raised};
use crate::choices::way_of_pages;
use crate::dlpack::borrow;
use crate::failure::{Failure, call_core};
use crate::ops::row_pages::fp8_pages;
use crate::scalars::Number;

type Any<'py> = Bound<'py, PyAny>;

/// As `move_pages_cuda`; `home` has the scales of its pages, on the device, behind its arena.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (moves, slots, home, way, processors, stream))]
pub fn move_fp8_pages_cuda(
    py: Python<'_>,
    moves: (TablePair<'_>, TablePair<'_>),
    slots: (Any<'_>, TablePair<'_>, Number),
    home: (Any<'_>, Any<'_>, TablePair<'_>, Number),
    way: &str,
    processors: Number,
    stream: u64,
) -> PyResult<()> {
    let scales = borrow("scales", &home.1)?;
    let (slots, home) = (
        Side::of(("slots", "blocks of slots"), &slots)?,
        Side::of(("home", "blocks of home"), &(home.0, home.2, home.3))?,
    );
    let steps = Steps::of(&moves)?;
    let checks = || {
        let (way, scales) = (way_of_pages(way)?, &scales.tensor);
        // Slots of fp8 would be of scales that nobody knows.
        let place = Place::of_rows("slots", slots.arena())?;
        let (of_slots, of_home) = (slots.rows(&place)?, home.rows(&place)?);
        let page = of_slots.1 / slots.arena().dtype.bytes();
        let pages = fp8_pages(home.arena(), scales, page)?;
        scales.expect_device("scales", place.device)?;
        let written = match way {
            Way::Fetch => vec![("slots", slots.arena())],
            Way::Spill => vec![("home", home.arena()), ("scales", scales)],
        };
        for (what, tensor) in written {
            tensor.expect_writable(what)?;
            let others = [("slots", slots.arena()), ("home", home.arena()), ("scales", scales)];
            for (name, other) in others.into_iter().filter(|(name, _)| *name != what) {
                tensor.expect_apart(what, other, name)?;
            }
            steps.expect_apart((what, tensor), [&slots, &home])?;
        }
        let sides = (of_slots.0, of_home.0);
        let processors = count("processors", processors)?;
        let moves = steps.launch(&place, sides, way, (of_slots.1, processors), stream)?;
        let on_host = steps.on_host(&moves, [&slots, &home])?;
        let scales = DeviceTensor { address: scales.ptr as u64, len: 2 * pages };
        Ok((place.ordinal, MoveFp8PagesLaunch { moves, dtype: place.dtype, scales }, on_host))
    };
    let (ordinal, launch, on_host) = raised(py, checks())?;
    call_core(py, || {
        if let Some(moves) = on_host {
            moves.validate()?;
        }
        // SAFETY: as for `move_pages_cuda`; the scales are on the device.
        unsafe { backend(ordinal)?.move_fp8_pages(&launch) }.map_err(Failure::from)
    })
}
