//! Launch of `select_pages.cu`, on Hopper and of few long rows of `select_pages_sm90.cu`.

use crate::attend_plan::is_hopper;
use crate::backend::CudaBackend;
use crate::choice_params::SelectPagesParams;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceTensor, blocks_of, narrow};

/// Scores of a row that a thread block may hold and its threads: a kernel each. The last takes
/// longer rows too.
const HELD: [(usize, u32); 4] = [(2048, 256), (4096, 512), (8192, 512), (16_384, 1024)];

/// Thread blocks of a cluster, which share a row: `kParts` of `select_pages_sm90.cu`.
const PARTS: usize = 8;
/// Scores of a row that a cluster may hold and threads of each of its blocks, likewise.
const HELD_SHARED: [(usize, u32); 4] =
    [(16_384, 256), (32_768, 512), (65_536, 512), (131_072, 1024)];
/// Rows of no more scores are a thread block's each: barriers of a cluster cost more than they
/// save.
const SHORT: usize = 8192;
/// Thread blocks of clusters that a processor may get where rows are longer than one block holds:
/// two run at a time, and two behind these. How many of the rows list much is not known here, and
/// blocks of rows that do not have to be waited for as well.
const TURNS: usize = 4;

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
        let shared = is_hopper(&self.context.device)
            && is_shared(call.rows, call.width, self.processors() as usize);
        let (source, held, parts) = if shared {
            ("select_pages_sm90", &HELD_SHARED[..], PARTS)
        } else {
            ("select_pages", &HELD[..], 1)
        };
        let blocks = [blocks_of("rows of scores", call.rows.saturating_mul(parts))?, 1, 1];
        let (held, threads) = held_of(held, call.width);
        let grid = Grid { blocks, threads, shared_bytes: 0 };
        let name = format!("{source}_{held}");
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch((source, &name), grid, call.stream, &params) }
    }
}

/// Scores that one of these kernels holds, and the threads of a block of it: of the smallest that
/// holds a row, or else of the last. What is selected does not depend on them.
fn held_of(kernels: &[(usize, u32)], width: usize) -> (usize, u32) {
    kernels.iter().copied().find(|&(held, _)| width <= held).unwrap_or(kernels[kernels.len() - 1])
}

/// Whether clusters share the rows: where these are long, and so few that a thread block for each
/// would leave most processors idle. It changes nothing of what is selected.
fn is_shared(rows: usize, width: usize, processors: usize) -> bool {
    let (alone, _) = HELD[HELD.len() - 1];
    let turns = if width > alone { TURNS } else { 1 };
    width > SHORT && rows.saturating_mul(PARTS) <= turns * processors
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
        let widths = [0, 1, 2048, 2049, 8192, 8193, 16_385, 65_536, 1 << 20];
        let alone = widths.map(|width| held_of(&HELD, width).0);
        assert_eq!(alone, [2048, 2048, 2048, 4096, 8192, 16_384, 16_384, 16_384, 16_384]);
        let shared = widths.map(|width| held_of(&HELD_SHARED, width).0);
        let least = [16_384; 6];
        assert_eq!(shared[..6], least);
        assert_eq!(shared[6..], [32_768, 65_536, 131_072]);
    }

    #[test]
    fn clusters_share_rows_that_are_long_and_few() {
        // On a device of 132 processors: the most rows that are shared, by their width.
        for (width, most) in [(640, 0), (8192, 0), (8193, 16), (16_384, 16)] {
            assert!(most == 0 || is_shared(most, width, 132), "{most} of {width}");
            assert!(!is_shared(most + 1, width, 132), "{} of {width}", most + 1);
        }
        for width in [16_385, 65_536, 1 << 20] {
            assert!(is_shared(1, width, 132) && is_shared(66, width, 132), "{width}");
            assert!(!is_shared(67, width, 132) && !is_shared(usize::MAX, width, 132), "{width}");
        }
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
