//! Launch of `select_pages.cu`.

use crate::backend::CudaBackend;
use crate::choice_params::SelectPagesParams;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceTensor, blocks_of, narrow};

/// Scores of a row that a thread block may hold and its threads: a kernel each. The last takes
/// longer rows too.
const HELD: [(usize, u32); 4] = [(2048, 256), (4096, 512), (8192, 512), (16_384, 1024)];

/// The best pages of each row: `kvweave_core::ops::SelectPages`, whose checks are the caller's
/// where counts and budgets are on the host. The kernel takes a count beyond the row as its width,
/// and leaves out what a row of results has no room for.
#[derive(Clone, Copy, Debug)]
pub struct SelectPagesLaunch {
    /// f32 [rows, width], contiguous.
    pub scores: DeviceTensor,
    /// S.
    pub width: usize,
    /// i32 [rows].
    pub counts: DeviceTensor,
    /// i32 [rows].
    pub budgets: DeviceTensor,
    /// R.
    pub rows: usize,
    /// Pages at a row's start that are always selected.
    pub sink: usize,
    /// And at its end.
    pub recent: usize,
    /// i32 [rows, most], contiguous.
    pub pages: DeviceTensor,
    /// K.
    pub most: usize,
    /// i32 [rows].
    pub selected: DeviceTensor,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the selection on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, and `stream` is a stream of this device.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn select_pages(&self, call: &SelectPagesLaunch) -> Result<(), CudaError> {
        let params = params_of(call)?;
        if call.rows == 0 {
            return Ok(());
        }
        let blocks = [blocks_of("rows of scores", call.rows)?, 1, 1];
        let (held, threads) = held_of(call.width);
        let grid = Grid { blocks, threads, shared_bytes: 0 };
        let name = format!("select_pages_{held}");
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("select_pages", &name), grid, call.stream, &params) }
    }
}

/// Scores that a thread block holds, and its threads. What it selects does not depend on them.
fn held_of(width: usize) -> (usize, u32) {
    HELD.into_iter().find(|&(held, _)| width <= held).unwrap_or(HELD[HELD.len() - 1])
}

fn params_of(call: &SelectPagesLaunch) -> Result<SelectPagesParams, CudaError> {
    call.scores.expect_size("scores", &[call.rows, call.width])?;
    call.counts.expect("counts", call.rows)?;
    call.budgets.expect("budgets", call.rows)?;
    call.pages.expect_size("pages", &[call.rows, call.most])?;
    call.selected.expect("selected", call.rows)?;
    // Numbers of pages are signed where they are written.
    let limit = i32::MAX.cast_unsigned() as usize;
    for (what, size) in [("width of scores", call.width), ("width of pages", call.most)] {
        if size > limit {
            return Err(CudaError::invalid(what, format!("at most {limit}"), size));
        }
    }
    Ok(SelectPagesParams {
        scores: call.scores.address,
        counts: call.counts.address,
        budgets: call.budgets.address,
        pages: call.pages.address,
        selected: call.selected.address,
        width: narrow("width of scores", call.width)?,
        most: narrow("width of pages", call.most)?,
        // More than a row has is as good as all of it.
        sink: narrow("sink", call.sink.min(limit))?,
        recent: narrow("recent", call.recent.min(limit))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(rows: usize, width: usize, len: usize) -> SelectPagesLaunch {
        let tensor = DeviceTensor { address: 256, len };
        SelectPagesLaunch {
            scores: tensor,
            width,
            counts: tensor,
            budgets: tensor,
            rows,
            sink: 1,
            recent: usize::MAX,
            pages: tensor,
            most: 5,
            selected: tensor,
            stream: 0,
        }
    }

    #[test]
    fn the_smallest_kernel_that_holds_a_row_takes_it() {
        let held = [0, 1, 2048, 2049, 8192, 8193, 1 << 20].map(|width| held_of(width).0);
        assert_eq!(held, [2048, 2048, 2048, 4096, 8192, 16_384, 16_384]);
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        assert!(params_of(&call(3, 7, 21)).is_ok());
        let expected = "at least 21 elements";
        let refused = CudaError::invalid("scores", expected, 20);
        assert_eq!(params_of(&call(3, 7, 20)), Err(refused));
        assert!(params_of(&call(usize::MAX, 7, 21)).is_err());
        assert!(params_of(&call(0, 1 << 31, 21)).is_err());
    }

    #[test]
    fn more_than_a_row_is_all_of_it() {
        assert_eq!(params_of(&call(3, 7, 21)).map(|params| params.recent), Ok(0x7fff_ffff));
    }
}
