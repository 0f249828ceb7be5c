//! `move_pages` on the host, to and from pages in e4m3 numbers.

use kvweave_core::ops::{Fp8Arenas, MoveFp8Pages, Way};
use pyo3::prelude::*;

use super::element::{run, with_element};
use super::move_pages::Steps;
use crate::arguments::raised;
use crate::choices::way_of_pages;
use crate::dlpack::borrow;
use crate::dtype::{DType, ROWS};
use crate::ops::row_pages::{fp8_pages, pages_of_arena};
use crate::scalars::Number;

type Any<'py> = Bound<'py, PyAny>;

/// As `move_pages`; `home` has the scales of its pages behind its arena.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (moves, slots, home, way, reference))]
pub fn move_fp8_pages(
    py: Python<'_>,
    moves: (Any<'_>, Any<'_>),
    slots: (Any<'_>, Any<'_>, Number),
    home: (Any<'_>, Any<'_>, Any<'_>, Number),
    way: &str,
    reference: bool,
) -> PyResult<()> {
    let steps = Steps::of(&moves, (&slots.1, slots.2), (&home.2, home.3))?;
    let arenas = (borrow("slots", &slots.0)?, borrow("home", &home.0)?, borrow("scales", &home.1)?);
    with_element!(py, ("slots", ROWS), arenas.0.tensor.dtype, T => {
        let params = || {
            let way = way_of_pages(way)?;
            let (slots, home, scales) = (&arenas.0.tensor, &arenas.1.tensor, &arenas.2.tensor);
            let (slot_pages, slot_bytes) = pages_of_arena("slots", slots)?;
            let page = slot_bytes / slots.dtype.bytes();
            let home_pages = fp8_pages(home, scales, page)?;
            scales.expect_dtype("scales", DType::U8)?;
            let moves = steps.moves(slot_pages, home_pages, way)?;
            slots.expect_apart("slots", home, "home")?;
            scales.expect_apart("scales", slots, "slots")?;
            scales.expect_apart("scales", home, "home")?;
            let arenas = match way {
                Way::Fetch => {
                    steps.expect_apart("slots", slots)?;
                    // SAFETY: what is written lies apart from all that is read; others are
                    // excluded as `arguments` says.
                    unsafe {
                        Fp8Arenas::Fetch {
                            home: home.slice("home")?,
                            scales: scales.bytes("scales")?.as_chunks().0,
                            slots: slots.slice_mut::<T>("slots")?,
                        }
                    }
                }
                Way::Spill => {
                    steps.expect_apart("home", home)?;
                    steps.expect_apart("scales", scales)?;
                    // SAFETY: as for a fetch.
                    unsafe {
                        Fp8Arenas::Spill {
                            slots: slots.slice::<T>("slots")?,
                            home: home.slice_mut("home")?,
                            scales: scales.bytes_mut("scales")?.as_chunks_mut().0,
                        }
                    }
                }
            };
            Ok(MoveFp8Pages { moves, page, arenas })
        };
        run!(py, reference, move_fp8_pages, raised(py, params())?)
    })
}
