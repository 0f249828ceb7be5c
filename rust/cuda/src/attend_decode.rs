//! Launch of `attend_decode_sm90.cu` or `attend_decode.cu`.

use crate::attend_call::AttendLaunch;
use crate::attend_plan::{BULK_TOKENS, COPIED_TOKENS, DecodePlan, QUERIES};
use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{bytes_of, factor_of, narrow};
use crate::params::{AttendParams, TiledAttendParams};
use crate::tiled_pages::tiled;

impl CudaBackend {
    /// Requests in turns of as many as a launch lays out.
    ///
    /// # Safety
    /// As for [`CudaBackend::attend`].
    pub(crate) unsafe fn attend_decode(
        &self,
        call: &AttendLaunch<'_>,
        params: AttendParams,
        &DecodePlan { ref kernel, grid, hopper, requests }: &DecodePlan,
    ) -> Result<(), CudaError> {
        let params = with_factors(call, params, grid, hopper)?;
        let tiled = if hopper { Some(tiled(call, params, false)?) } else { None };
        for first in (0..call.requests).step_by(requests) {
            let count = requests.min(call.requests - first);
            let turn = of_requests(call, params, first, count)?;
            // SAFETY: the tensors of these requests are parts of the whole ones.
            unsafe {
                if let Some(tiled) = tiled {
                    let turn = TiledAttendParams { attend: turn, ..tiled };
                    self.launch(("attend_decode_sm90", kernel), grid, call.stream, &turn)
                } else {
                    self.launch(("attend_decode", kernel), grid, call.stream, &turn)
                }
            }?;
        }
        Ok(())
    }
}

/// The params of some of the requests.
pub(crate) fn of_requests(
    call: &AttendLaunch<'_>,
    params: AttendParams,
    first: usize,
    count: usize,
) -> Result<AttendParams, CudaError> {
    let (bytes, states) = (bytes_of(call.dtype), call.query_heads);
    let at = |address: u64, size: usize| address + (first * size) as u64;
    let mut turn = params;
    turn.rows = narrow("rows", count)?;
    turn.requests = turn.rows;
    turn.q = at(params.q, call.q.row_stride * bytes);
    turn.positions = at(params.positions, size_of::<i32>());
    turn.kv.entry_offsets = at(params.kv.entry_offsets, call.kv.tables() * size_of::<i32>());
    turn.out = at(params.out, states * call.kv.geometry.head_dim * bytes);
    turn.lse = at(params.lse, states * size_of::<f32>());
    Ok(turn)
}

/// What decode divides by, as factors.
fn with_factors(
    call: &AttendLaunch<'_>,
    params: AttendParams,
    grid: Grid,
    hopper: bool,
) -> Result<AttendParams, CudaError> {
    let geometry = &call.kv.geometry;
    let run = if hopper { BULK_TOKENS } else { COPIED_TOKENS };
    Ok(AttendParams {
        run_factor: factor_of("page_tokens", geometry.page_tokens / run)?,
        head_factor: factor_of("kv_heads", geometry.kv_heads)?,
        chunk_factor: factor_of("query heads", call.group().div_ceil(QUERIES))?,
        block_factor: factor_of("thread blocks", grid.blocks[0] as usize)?,
        ..params
    })
}
