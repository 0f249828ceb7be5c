//! `recycle_pages` on CUDA, of the heads of requests that have seats.

use kvweave_cuda::{DeviceTensor, RecyclePagesLaunch, SeatedRows};
use pyo3::prelude::*;

use super::arguments::{Place, extent_of};
use super::recycle_pages::launched;
use super::workspace::{Needs, Space, Workspace};
use crate::arguments::{count, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::scalars::Number;
use crate::tensor::TensorRef;

type Any<'py> = Bound<'py, PyAny>;
/// Axes by name, and their sizes where they are known.
type Shape<'a> = &'a [(&'static str, Option<usize>)];
const NOTHING: DeviceTensor = DeviceTensor { address: 0, len: 0 };

/// Returns nothing when it has launched, or else what the call needs of `workspace`, as
/// `recycle_pages_cuda`.
///
/// `chosen` are pages of requests or, where that is said, of seats, and entries of requests,
/// written in place; `seats` the slots, written in place, what these are called, and how many pages
/// lie elsewhere; `rows` the seat of each request, which heads of pages they have, the rank of the
/// first one, and what pages are below; `results` places, moves, their count, and what was refused.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (chosen, seats, rows, results, workspace, stream))]
pub fn recycle_seats_cuda(
    py: Python<'_>,
    chosen: (Any<'_>, bool, Any<'_>),
    seats: (Any<'_>, Any<'_>, Any<'_>),
    rows: (Any<'_>, Any<'_>, Number, Number),
    results: (Any<'_>, Any<'_>, Any<'_>, Any<'_>),
    workspace: Option<Workspace<'_>>,
    stream: u64,
) -> PyResult<Option<Needs>> {
    let tensors = Tensors {
        pages: borrow("pages", &chosen.0)?,
        by_seat: chosen.1,
        entries: borrow("entries", &chosen.2)?,
        held: borrow("held", &seats.0)?,
        slots: borrow("slots", &seats.1)?,
        away: borrow("away", &seats.2)?,
        of: borrow("of", &rows.0)?,
        heads: borrow("heads", &rows.1)?,
        results: [
            borrow("places", &results.0)?,
            borrow("moves", &results.1)?,
            borrow("count", &results.2)?,
            borrow("refused", &results.3)?,
        ],
    };
    let space = workspace.map(Space::of).transpose()?;
    let checks = || tensors.launch(count("rank", rows.2)?, count("limit", rows.3)?, stream);
    let (place, launch) = raised(py, checks())?;
    launched(py, &place, launch, space.as_ref())
}

/// What lies on the device, as the op has it.
struct Tensors<'py> {
    pages: Borrowed<'py>,
    by_seat: bool,
    entries: Borrowed<'py>,
    held: Borrowed<'py>,
    slots: Borrowed<'py>,
    away: Borrowed<'py>,
    of: Borrowed<'py>,
    heads: Borrowed<'py>,
    /// Places, moves, their count, and what was refused.
    results: [Borrowed<'py>; 4],
}

/// Requests, rows of each, seats, rows of slots and slots of each, heads and pages of lists.
struct Sizes {
    requests: usize,
    ranks: usize,
    seats: usize,
    ranks_of_seat: usize,
    width: usize,
    heads: usize,
    most: usize,
}

impl Tensors<'_> {
    fn launch(
        &self,
        first: usize,
        limit: usize,
        stream: u64,
    ) -> Result<(Place, RecyclePagesLaunch), Failure> {
        let place = Place::of_numbers("held", &self.held.tensor)?;
        let sizes = self.sizes()?;
        let lists = if self.by_seat { sizes.seats } else { sizes.requests };
        let of_lists = [("B", Some(lists)), ("G", None), ("K", None)];
        let of_seats = ("N", Some(sizes.seats));
        let read: [(&str, &TensorRef, Shape<'_>); 5] = [
            ("pages", &self.pages.tensor, &of_lists),
            ("slots", &self.slots.tensor, &[of_seats, ("S", Some(sizes.width))]),
            ("away", &self.away.tensor, &[of_seats]),
            ("of", &self.of.tensor, &[("B", None)]),
            ("heads", &self.heads.tensor, &[("n", None)]),
        ];
        let mut extents = [NOTHING; 5];
        for (extent, (what, tensor, shape)) in extents.iter_mut().zip(read) {
            place.expect(what, tensor, DType::I32)?;
            tensor.expect_shape(what, shape)?;
            tensor.expect_contiguous(what)?;
            *extent = extent_of(what, tensor)?;
        }
        let [pages, blocks, away, of, heads] = extents;
        let named = read.map(|(what, tensor, _)| (what, tensor));
        let [entries, slots, places, moves, count, refused] =
            self.written(&place, &sizes, &named)?;
        let Sizes { requests, ranks, seats, ranks_of_seat, width, heads: heads_of_pages, most } =
            sizes;
        let by_seat = self.by_seat;
        let seats = SeatedRows {
            of,
            heads,
            away,
            blocks,
            entries,
            seats,
            ranks,
            heads_of_pages,
            ranks_of_seat,
            first,
            by_seat,
        };
        let launch = RecyclePagesLaunch {
            pages,
            most,
            selected: NOTHING,
            rows: requests.saturating_mul(ranks),
            limit,
            pinned: None,
            slots,
            width,
            places,
            moves,
            count,
            refused,
            counters: NOTHING,
            seats: Some(seats),
            stream,
        };
        Ok((place, launch))
    }

    fn sizes(&self) -> Result<Sizes, Failure> {
        self.held.tensor.expect_shape("held", &[("N", None), ("H", None), ("S", None)])?;
        self.pages.tensor.expect_shape("pages", &[("B", None), ("G", None), ("K", None)])?;
        self.of.tensor.expect_shape("of", &[("B", None)])?;
        self.heads.tensor.expect_shape("heads", &[("n", None)])?;
        let (held, pages) = (self.held.tensor.shape(), self.pages.tensor.shape());
        Ok(Sizes {
            requests: self.of.tensor.shape()[0],
            ranks: self.heads.tensor.shape()[0],
            seats: held[0],
            ranks_of_seat: held[1],
            width: held[2],
            heads: pages[1],
            most: pages[2],
        })
    }

    /// Entries, slots, places, moves, their count, and what was refused, apart from what is `read`.
    fn written(
        &self,
        place: &Place,
        sizes: &Sizes,
        read: &[(&str, &TensorRef)],
    ) -> Result<[DeviceTensor; 6], Failure> {
        let of_pages = ("K", Some(sizes.most));
        let of_rows = ("R", Some(sizes.requests.saturating_mul(sizes.ranks)));
        let of_requests = ("B", Some(sizes.requests));
        let named = [of_requests, ("G", Some(sizes.heads)), of_pages, ("columns", Some(5))];
        let shapes: [(&str, &TensorRef, Shape<'_>); 6] = [
            ("entries", &self.entries.tensor, &named),
            ("held", &self.held.tensor, &[("N", None), ("H", None), ("S", None)]),
            ("places", &self.results[0].tensor, &[of_rows, of_pages]),
            ("moves", &self.results[1].tensor, &[("M", None), ("columns", Some(3))]),
            ("count", &self.results[2].tensor, &[("1", Some(1))]),
            ("refused", &self.results[3].tensor, &[of_rows]),
        ];
        let (mut apart, mut written) = (read.to_vec(), [NOTHING; 6]);
        for (written, (what, tensor, shape)) in written.iter_mut().zip(shapes) {
            *written = place.output(what, tensor, (DType::I32, shape), &apart)?;
            apart.push((what, tensor));
        }
        Ok(written)
    }
}
