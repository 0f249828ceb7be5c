//! `move_pages` on CUDA.

use kvweave_core::ops::{Moves, RowPages, Way};
use kvweave_cuda::{DeviceRowPages, DeviceTensor, MovePagesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair};
use super::device::backend;
use crate::arguments::{count, raised};
use crate::choices::way_of_pages;
use crate::dlpack::{Borrowed, borrow};
use crate::failure::{Failure, call_core};
use crate::ops::row_pages::{equal_pages, pages_of_arena};
use crate::scalars::Number;
use crate::tensor::{Device, TensorRef};

type Any<'py> = Bound<'py, PyAny>;

/// `moves` and their count; `slots` and `home` are an arena, its blocks and their ranks. The call
/// may fill so many `processors`; `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (moves, slots, home, way, processors, stream))]
pub fn move_pages_cuda(
    py: Python<'_>,
    moves: (TablePair<'_>, TablePair<'_>),
    slots: (Any<'_>, TablePair<'_>, Number),
    home: (Any<'_>, TablePair<'_>, Number),
    way: &str,
    processors: Number,
    stream: u64,
) -> PyResult<()> {
    let (steps, number) =
        (DeviceTable::of("moves", &moves.0)?, DeviceTable::of("count", &moves.1)?);
    let (slots, home) = (
        Side::of(("slots", "blocks of slots"), &slots)?,
        Side::of(("home", "blocks of home"), &home)?,
    );
    let checks = || {
        let way = way_of_pages(way)?;
        let place = Place::of_numbers("slots", &slots.arena.tensor)?;
        let (written, read) = match way {
            Way::Fetch => (&slots, &home),
            Way::Spill => (&home, &slots),
        };
        written.arena.tensor.expect_writable(written.names.0)?;
        let tables = [
            (read.names.0, &read.arena.tensor),
            ("moves", &steps.on_device.tensor),
            ("count", &number.on_device.tensor),
            (slots.names.1, &slots.blocks.on_device.tensor),
            (home.names.1, &home.blocks.on_device.tensor),
        ];
        for (what, other) in tables {
            written.arena.tensor.expect_apart(written.names.0, other, what)?;
        }
        let (of_slots, of_home) = (slots.rows(&place)?, home.rows(&place)?);
        let (moves, most) = steps.rows::<3>("moves", &place)?;
        let launch = MovePagesLaunch {
            moves,
            most,
            count: number.list("count", &place)?.0,
            slots: of_slots.0,
            home: of_home.0,
            way,
            page_bytes: equal_pages(of_slots.1, of_home.1)?,
            processors: count("processors", processors)?,
            stream,
        };
        let on_host = (
            steps.rows_on_host::<3>("moves")?,
            number.list_on_host("count")?,
            slots.on_host(&launch.slots)?,
            home.on_host(&launch.home)?,
        );
        Ok((place.ordinal, launch, on_host))
    };
    let (ordinal, launch, on_host) = raised(py, checks())?;
    call_core(py, || {
        if let (Some(moves), Some(count), Some(slots), Some(home)) = on_host {
            Moves { moves, count, slots, home, way: launch.way }.validate()?;
        }
        // SAFETY: every tensor was read from a live owner, which torch keeps until the stream has
        // passed; those of the host are pinned, as the launch asks the driver of the first page.
        // That all pages which moves name are, and that none is written twice, was checked on the
        // host or is the caller's promise.
        unsafe { backend(ordinal)?.move_pages(&launch) }.map_err(Failure::from)
    })
}

/// An arena and the blocks of its rows.
struct Side<'py> {
    /// Of the arena, and of its blocks.
    names: (&'static str, &'static str),
    arena: Borrowed<'py>,
    blocks: DeviceTable<'py>,
    ranks: Number,
}

impl<'py> Side<'py> {
    fn of(
        names: (&'static str, &'static str),
        (arena, blocks, ranks): &(Any<'py>, TablePair<'py>, Number),
    ) -> PyResult<Self> {
        let (arena, blocks) = (borrow(names.0, arena)?, DeviceTable::of(names.1, blocks)?);
        Ok(Self { names, arena, blocks, ranks: *ranks })
    }

    /// Both as launches take them, and the bytes of a page.
    fn rows(&self, place: &Place) -> Result<(DeviceRowPages, usize), Failure> {
        let arena: &TensorRef = &self.arena.tensor;
        let on_host = arena.device == Device::Cpu;
        if !on_host {
            arena.expect_device(self.names.0, place.device)?;
        }
        let (pages, bytes) = pages_of_arena(self.names.0, arena)?;
        let of_rows = &self.blocks.on_device.tensor;
        of_rows.expect_shape(self.names.1, &[("N", None), ("W", None)])?;
        let width = of_rows.shape()[1];
        let (blocks, tables) = self.blocks.wide(self.names.1, place, width)?;
        let data = DeviceTensor { address: arena.ptr as u64, len: pages * bytes };
        let ranks = count("ranks", self.ranks)?;
        Ok((DeviceRowPages { data, on_host, blocks, tables, width, ranks, pages }, bytes))
    }

    /// The same for the core's checks, where the table came from the host.
    fn on_host(&self, of: &DeviceRowPages) -> Result<Option<RowPages<'_>>, Failure> {
        let DeviceRowPages { width, ranks, pages, .. } = *of;
        let blocks = self.blocks.wide_on_host(self.names.1, width)?;
        Ok(blocks.map(|blocks| RowPages { blocks, width, ranks, pages }))
    }
}
