//! `move_pages` on CUDA.

use kvweave_core::ops::{Moves, RowPages, Way, page_spans};
use kvweave_cuda::{CopiedArena, CopyPagesLaunch, DeviceRowPages, DeviceTensor, MovePagesLaunch};
use pyo3::prelude::*;

use super::arguments::{DeviceTable, Place, TablePair};
use super::device::backend;
use crate::arguments::{count, raised};
use crate::choices::way_of_pages;
use crate::dlpack::{Borrowed, borrow};
use crate::failure::{Failure, call_core};
use crate::ops::cpu::move_pages::Steps as HostSteps;
use crate::ops::row_pages::{PageArenas, equal_pages, pages_of_arena};
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
    let steps = Steps::of(&moves)?;
    let (slots, home) = (
        Side::of(("slots", "blocks of slots"), &slots)?,
        Side::of(("home", "blocks of home"), &home)?,
    );
    let checks = || {
        let way = way_of_pages(way)?;
        let place = Place::of_numbers("slots", slots.arena())?;
        let (written, read) = match way {
            Way::Fetch => (&slots, &home),
            Way::Spill => (&home, &slots),
        };
        written.arena().expect_writable(written.names.0)?;
        written.arena().expect_apart(written.names.0, read.arena(), read.names.0)?;
        steps.expect_apart((written.names.0, written.arena()), [&slots, &home])?;
        let (of_slots, of_home) = (slots.rows(&place)?, home.rows(&place)?);
        let page_bytes = equal_pages(of_slots.1, of_home.1)?;
        let size = (page_bytes, count("processors", processors)?);
        let launch = steps.launch(&place, (of_slots.0, of_home.0), way, size, stream)?;
        let on_host = steps.on_host(&launch, [&slots, &home])?;
        Ok((place.ordinal, launch, on_host))
    };
    let (ordinal, launch, on_host) = raised(py, checks())?;
    call_core(py, || {
        if let Some(moves) = on_host {
            moves.validate()?;
        }
        // SAFETY: every tensor was read from a live owner, which torch keeps until the stream has
        // passed; those of the host are pinned, as the launch asks the driver of the first page.
        // That all pages which moves name are, and that none is written twice, was checked on the
        // host or is the caller's promise.
        unsafe { backend(ordinal)?.move_pages(&launch) }.map_err(Failure::from)
    })
}

/// As `move_pages_cuda` with all tables on the host, carried by the device's copy engine.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (moves, slots, home, way, stream))]
pub fn copy_pages_cuda(
    py: Python<'_>,
    moves: (Any<'_>, Any<'_>),
    slots: (Any<'_>, Any<'_>, Number),
    home: (Any<'_>, Any<'_>, Number),
    way: &str,
    stream: u64,
) -> PyResult<()> {
    let steps = HostSteps::of(&moves, (&slots.1, slots.2), (&home.1, home.2))?;
    let arenas = (borrow("slots", &slots.0)?, borrow("home", &home.0)?);
    let checks = || {
        let way = way_of_pages(way)?;
        let (of_slots, of_home) = (&arenas.0.tensor, &arenas.1.tensor);
        let place = Place::of_numbers("slots", of_slots)?;
        if of_home.device != Device::Cpu {
            of_home.expect_device("home", place.device)?;
        }
        let sides = PageArenas::of(of_slots, of_home, way)?;
        let PageArenas { page_bytes, source, target, .. } = sides;
        target.1.expect_writable(target.0)?;
        steps.expect_apart(target.0, target.1)?;
        let moves = steps.moves(sides.slot_pages, sides.home_pages, way)?;
        Ok((place.ordinal, copied(source)?, copied(target)?, page_bytes, moves))
    };
    let (ordinal, source, target, page_bytes, moves) = raised(py, checks())?;
    call_core(py, || {
        moves.validate()?;
        let spans = page_spans(moves.iter());
        let launch = CopyPagesLaunch { source, target, spans: &spans, page_bytes, stream };
        // SAFETY: every tensor was read from a live owner, which torch keeps until the stream has
        // passed; the moves were checked against both arenas, so their spans lie within them.
        unsafe { backend(ordinal)?.copy_pages(&launch) }.map_err(Failure::from)
    })
}

fn copied((what, arena): (&str, &TensorRef)) -> Result<CopiedArena, Failure> {
    let (pages, bytes) = pages_of_arena(what, arena)?;
    let data = DeviceTensor { address: arena.ptr as u64, len: pages * bytes };
    Ok(CopiedArena { data, on_host: arena.device == Device::Cpu })
}

/// Moves and their count.
pub(super) struct Steps<'py> {
    moves: DeviceTable<'py>,
    count: DeviceTable<'py>,
}

impl<'py> Steps<'py> {
    pub(super) fn of((moves, count): &(TablePair<'py>, TablePair<'py>)) -> PyResult<Self> {
        let moves = DeviceTable::of("moves", moves)?;
        Ok(Self { moves, count: DeviceTable::of("count", count)? })
    }

    /// Refuses to have one of the tables written.
    pub(super) fn expect_apart(
        &self,
        (what, written): (&str, &TensorRef),
        sides: [&Side<'_>; 2],
    ) -> Result<(), Failure> {
        let blocks = sides.map(|side| (side.names.1, &side.blocks.on_device.tensor));
        let own = [("moves", &self.moves), ("count", &self.count)];
        let tables = own.map(|(name, table)| (name, &table.on_device.tensor));
        let mut all = tables.into_iter().chain(blocks);
        all.try_for_each(|(name, table)| written.expect_apart(what, table, name))
    }

    /// The launch between `slots` and `home`, of so many bytes of a page and `processors`.
    pub(super) fn launch(
        &self,
        place: &Place,
        (slots, home): (DeviceRowPages, DeviceRowPages),
        way: Way,
        (page_bytes, processors): (usize, usize),
        stream: u64,
    ) -> Result<MovePagesLaunch, Failure> {
        let (moves, most) = self.moves.rows::<3>("moves", place)?;
        let count = self.count.list("count", place)?.0;
        Ok(MovePagesLaunch { moves, most, count, slots, home, way, page_bytes, processors, stream })
    }

    /// The same for the core's checks, where all tables came from the host.
    pub(super) fn on_host<'a>(
        &'a self,
        of: &MovePagesLaunch,
        [slots, home]: [&'a Side<'_>; 2],
    ) -> Result<Option<Moves<'a>>, Failure> {
        let tables = (
            self.moves.rows_on_host::<3>("moves")?,
            self.count.list_on_host("count")?,
            slots.on_host(&of.slots)?,
            home.on_host(&of.home)?,
        );
        Ok(match tables {
            (Some(moves), Some(count), Some(slots), Some(home)) => {
                Some(Moves { moves, count, slots, home, way: of.way })
            }
            _ => None,
        })
    }
}

/// An arena and the blocks of its rows.
pub(super) struct Side<'py> {
    /// Of the arena, and of its blocks.
    names: (&'static str, &'static str),
    arena: Borrowed<'py>,
    blocks: DeviceTable<'py>,
    ranks: Number,
}

impl<'py> Side<'py> {
    /// The arena.
    pub(super) fn arena(&self) -> &TensorRef {
        &self.arena.tensor
    }

    pub(super) fn of(
        names: (&'static str, &'static str),
        (arena, blocks, ranks): &(Any<'py>, TablePair<'py>, Number),
    ) -> PyResult<Self> {
        let (arena, blocks) = (borrow(names.0, arena)?, DeviceTable::of(names.1, blocks)?);
        Ok(Self { names, arena, blocks, ranks: ranks.clone() })
    }

    /// Both as launches take them, and the bytes of a page.
    pub(super) fn rows(&self, place: &Place) -> Result<(DeviceRowPages, usize), Failure> {
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
        let ranks = count("ranks", &self.ranks)?;
        Ok((DeviceRowPages { data, on_host, blocks, tables, width, ranks, pages }, bytes))
    }

    /// The same for the core's checks, where the table came from the host.
    fn on_host(&self, of: &DeviceRowPages) -> Result<Option<RowPages<'_>>, Failure> {
        let DeviceRowPages { width, ranks, pages, .. } = *of;
        let blocks = self.blocks.wide_on_host(self.names.1, width)?;
        Ok(blocks.map(|blocks| RowPages { blocks, width, ranks, pages }))
    }
}
