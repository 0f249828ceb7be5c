//! Launches of `move_fp8_pages.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::Way;

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::move_pages::{BLOCKS, MovePagesLaunch, THREADS, row_pages};
use crate::move_params::MoveFp8PagesParams;
use crate::operands::{DeviceTensor, bytes_of, name_of, narrow};

/// `kPiece` of the kernels: numbers that a warp fetches at a time.
const PIECE: usize = 4096;
/// Numbers of keys, and of values, come in words of so many.
const WORD: usize = 16;

/// Pages carried from and to e4m3 ones: `kvweave_core::ops::MoveFp8Pages`, whose checks are the
/// caller's where all tables are on the host.
#[derive(Clone, Copy, Debug)]
pub struct MoveFp8PagesLaunch {
    /// What is moved where; `page_bytes` are those of a page of slots.
    pub moves: MovePagesLaunch,
    /// Numbers of slots: not fp8.
    pub dtype: KvDtype,
    /// u8 [pages of home, 2], contiguous, on the device.
    pub scales: DeviceTensor,
}

impl CudaBackend {
    /// Puts the moves on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// As for [`Self::move_pages`].
    ///
    /// # Errors
    /// As [`Self::move_pages`]; `Unsupported` for keys of a page that are no multiple of 16
    /// numbers.
    pub unsafe fn move_fp8_pages(&self, call: &MoveFp8PagesLaunch) -> Result<(), CudaError> {
        let MoveFp8PagesLaunch { moves, dtype, scales } = call;
        let page = moves.page_bytes / bytes_of(*dtype);
        if page == 0 || !page.is_multiple_of(2 * WORD) {
            let expected = format!("a multiple of {}", 2 * WORD);
            return Err(CudaError::unsupported("numbers of a page", expected, page));
        }
        if moves.processors == 0 {
            return Err(CudaError::invalid("processors", "at least 1", 0));
        }
        moves.moves.expect_size("moves", &[moves.most, 3])?;
        moves.count.expect("count", 1)?;
        scales.expect_size("scales", &[moves.home.pages, 2])?;
        let mut params = MoveFp8PagesParams {
            moves: moves.moves.address,
            count: moves.count.address,
            slots: row_pages("slots", &moves.slots, moves.page_bytes)?,
            home: row_pages("home", &moves.home, page)?,
            scales: scales.address,
            most: narrow("moves", moves.most)?,
            page: narrow("numbers of a page", page)?,
            page_pieces: narrow("numbers of a page", page.div_ceil(PIECE))?,
        };
        if moves.most == 0 || moves.slots.pages == 0 || moves.home.pages == 0 {
            return Ok(());
        }
        params.slots.data = self.reached("slots", &moves.slots)?;
        params.home.data = self.reached("home", &moves.home)?;
        let (way, pieces) = match moves.way {
            Way::Fetch => ("fetch", page.div_ceil(PIECE)),
            Way::Spill => ("spill", 2),
        };
        let processors = moves.processors.min(self.processors() as usize);
        let warps = THREADS as usize / 32;
        let most = moves.most.saturating_mul(pieces).div_ceil(warps);
        let blocks = [narrow("processors", (BLOCKS * processors).min(most))?, 1, 1];
        let grid = Grid { blocks, threads: THREADS, shared_bytes: 0 };
        let kernel = format!("{way}_fp8_{}", name_of(*dtype));
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("move_fp8_pages", &kernel), grid, moves.stream, &params) }
    }
}
