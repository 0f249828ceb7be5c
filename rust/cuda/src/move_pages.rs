//! Launch of `move_pages.cu`, on Hopper of `move_pages_sm90.cu`.

use kvweave_core::ops::Way;

use crate::attend_plan::is_hopper;
use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{Grid, reachable};
use crate::move_params::{MovePagesParams, RowPagesParams};
use crate::operands::{DeviceTensor, long, narrow};

/// `kThreads` of the kernel.
pub(crate) const THREADS: u32 = 128;
/// Thread blocks that a processor has at a time.
pub(crate) const BLOCKS: usize = 8;
/// `kPiece` of the kernel: bytes that a warp carries at a time.
const PIECE: usize = 4096;
/// Threads of Hopper's kernel: `kLanes`.
const RING_THREADS: u32 = 32;
/// `kPiece` of Hopper's kernel.
const RING_PIECE: usize = 2048;
/// Bytes of a load or store.
const WORD: usize = 16;

/// Pages of an arena by the numbers that rows give them: `kvweave_core::ops::RowPages`.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRowPages {
    /// Bytes of the arena.
    pub data: DeviceTensor,
    /// Whether they lie on the host; then they have to be pinned.
    pub on_host: bool,
    /// i32 [N, W], contiguous.
    pub blocks: DeviceTensor,
    /// N.
    pub tables: usize,
    /// W.
    pub width: usize,
    /// Rows of a row of blocks, at least 1.
    pub ranks: usize,
    /// Pages of the arena.
    pub pages: usize,
}

/// Pages carried: `kvweave_core::ops::Moves`, whose checks are the caller's where all tables are on
/// the host. The kernel skips moves that point outside a table or an arena.
#[derive(Clone, Copy, Debug)]
pub struct MovePagesLaunch {
    /// i32 [most, 3], contiguous.
    pub moves: DeviceTensor,
    /// M.
    pub most: usize,
    /// i32 [1].
    pub count: DeviceTensor,
    /// Where the slots of rows lie.
    pub slots: DeviceRowPages,
    /// Where their pages lie.
    pub home: DeviceRowPages,
    /// From which of the two to the other.
    pub way: Way,
    /// Bytes of a page: a multiple of 16.
    pub page_bytes: usize,
    /// Processors of the device that the call may fill.
    pub processors: usize,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the moves on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device, or of the host where it says so, that
    /// stays valid until the stream has run the kernel; `stream` is a stream of this device, and no
    /// page is written by two moves.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together and for host memory that is not
    /// pinned, `Unsupported` for pages that are no multiple of 16 bytes, `Driver` when the launch
    /// fails.
    pub unsafe fn move_pages(&self, call: &MovePagesLaunch) -> Result<(), CudaError> {
        let is_ring = is_hopper(&self.context.device);
        let mut params = params_of(call, if is_ring { RING_PIECE } else { PIECE })?;
        if call.most == 0 || call.slots.pages == 0 || call.home.pages == 0 {
            return Ok(());
        }
        params.slots.data = self.reached("slots", &call.slots)?;
        params.home.data = self.reached("home", &call.home)?;
        let processors = call.processors.min(self.processors() as usize);
        let (kernel, threads, most) = if is_ring {
            (
                ("move_pages_sm90", "move_pages_sm90"),
                RING_THREADS,
                ring_blocks(call.way) * processors,
            )
        } else {
            (("move_pages", "move_pages"), THREADS, BLOCKS * processors)
        };
        let pieces = call.most.saturating_mul(params.page_pieces as usize);
        let blocks = most.min(pieces.div_ceil(threads as usize / 32));
        let blocks = [narrow("processors", blocks)?, 1, 1];
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe {
            self.launch(kernel, Grid { blocks, threads, shared_bytes: 0 }, call.stream, &params)
        }
    }

    /// The address under which kernels reach an arena.
    pub(crate) fn reached(
        &self,
        what: &'static str,
        of: &DeviceRowPages,
    ) -> Result<u64, CudaError> {
        let DeviceTensor { address, len } = of.data;
        if !of.on_host {
            return Ok(address);
        }
        reachable(&self.context, address, len).ok_or_else(|| {
            CudaError::invalid(what, "pages on a CUDA device or in pinned memory", "pageable ones")
        })
    }
}

/// Thread blocks of Hopper's kernel that do for a processor. What is fetched is asked for and then
/// awaited; stores are taken at once, and more blocks would hold up all others on the device.
const fn ring_blocks(way: Way) -> usize {
    match way {
        Way::Fetch => 16,
        Way::Spill => 6,
    }
}

fn params_of(call: &MovePagesLaunch, piece: usize) -> Result<MovePagesParams, CudaError> {
    let bytes = call.page_bytes;
    if bytes == 0 || !bytes.is_multiple_of(WORD) {
        return Err(CudaError::unsupported(
            "bytes of a page",
            format!("a multiple of {WORD}"),
            bytes,
        ));
    }
    if call.processors == 0 {
        return Err(CudaError::invalid("processors", "at least 1", 0));
    }
    call.moves.expect_size("moves", &[call.most, 3])?;
    call.count.expect("count", 1)?;
    Ok(MovePagesParams {
        moves: call.moves.address,
        count: call.count.address,
        slots: row_pages("slots", &call.slots, bytes)?,
        home: row_pages("home", &call.home, bytes)?,
        most: narrow("moves", call.most)?,
        page_bytes: narrow("bytes of a page", bytes)?,
        page_pieces: narrow("bytes of a page", bytes.div_ceil(piece))?,
        spills: u32::from(call.way == Way::Spill),
    })
}

pub(crate) fn row_pages(
    what: &'static str,
    of: &DeviceRowPages,
    page_bytes: usize,
) -> Result<RowPagesParams, CudaError> {
    of.blocks.expect_size(what, &[of.tables, of.width])?;
    of.data.expect_size(what, &[of.pages, page_bytes])?;
    if of.ranks == 0 {
        return Err(CudaError::invalid("ranks", "at least 1", 0));
    }
    if !of.data.address.is_multiple_of(WORD as u64) {
        let got = format!("an address {} bytes past one", of.data.address % WORD as u64);
        return Err(CudaError::unsupported(what, format!("a boundary of {WORD} bytes"), got));
    }
    Ok(RowPagesParams {
        data: of.data.address,
        blocks: of.blocks.address,
        pages: long(what, of.pages)?,
        rows: narrow("ranks", of.tables.saturating_mul(of.ranks))?,
        width: narrow(what, of.width)?,
        ranks: narrow("ranks", of.ranks)?,
    })
}
