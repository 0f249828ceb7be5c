//! Launch of attention over pages: which kernel does a call, and how its work is cut.

use crate::attend_call::{AttendLaunch, AttendWorkspace};
use crate::attend_plan::{BULK_TOKENS, COPIED_TOKENS, Plan, QUERIES, is_tall};
use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{self, Grid};
use crate::operands::{Tiled, bytes_of, factor_of, long, name_of, narrow};
use crate::params::{AttendParams, TiledAttendParams};
use crate::tensor_map::TensorMap;

/// Bytes of columns that a copy takes side by side.
const BLOCK_BYTES: usize = 128;

impl CudaBackend {
    /// The workspace that [`CudaBackend::attend`] needs for a call, whose own is not looked at.
    #[must_use]
    pub fn attend_workspace(&self, call: &AttendLaunch<'_>) -> AttendWorkspace {
        let plan = Plan::of(call, &self.context.device);
        AttendWorkspace { floats: plan.floats(call), counters: plan.counters() }
    }

    /// Puts the attention on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, offsets split their tables, and `stream` is a stream of this device.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Unsupported` for a head dim that
    /// no kernel takes, `Driver` when the launch fails.
    pub unsafe fn attend(&self, call: &AttendLaunch<'_>) -> Result<(), CudaError> {
        if call.rows == 0 || call.query_heads == 0 {
            return Ok(());
        }
        let params = params_of(call)?;
        let plan = Plan::of(call, &self.context.device);
        call.floats.expect("floats of workspace", plan.floats(call))?;
        call.counters.expect("counters of workspace", plan.counters())?;
        // SAFETY: the params mirror the kernels' struct; addresses are the caller's promise.
        unsafe {
            match plan {
                Plan::Decode { kernel, grid, hopper, requests } => {
                    let params = with_factors(call, params, grid, hopper)?;
                    let tiled = if hopper { Some(tiled(call, params, false)?) } else { None };
                    self.decode(call, &params, (&kernel, grid), tiled, requests)
                }
                Plan::Prefill { kernel, grid, hopper } => {
                    self.prefill(call, params, (&kernel, grid), hopper)
                }
                Plan::Plain { kernel } => {
                    self.start("attend_plain", &kernel, Plan::warps(call)?, call.stream, &params)
                }
            }
        }
    }

    /// # Safety
    /// As for [`ffi::launch`].
    unsafe fn start<P: Copy>(
        &self,
        source: &'static str,
        kernel: &str,
        grid: Grid,
        stream: u64,
        params: &P,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel(source, kernel)?;
        // SAFETY: the caller's promise.
        unsafe { ffi::launch(&self.context, &kernel, grid, stream, params) }
    }

    /// Requests in turns of as many as a launch lays out.
    ///
    /// # Safety
    /// As for [`CudaBackend::attend`].
    unsafe fn decode(
        &self,
        call: &AttendLaunch<'_>,
        params: &AttendParams,
        (kernel, grid): (&str, Grid),
        tiled: Option<TiledAttendParams>,
        requests: usize,
    ) -> Result<(), CudaError> {
        let bytes = bytes_of(call.dtype);
        let states = call.query_heads;
        for first in (0..call.requests).step_by(requests) {
            let count = requests.min(call.requests - first);
            let at = |address: u64, size: usize| address + (first * size) as u64;
            let mut turn = *params;
            turn.rows = narrow("rows", count)?;
            turn.requests = turn.rows;
            turn.q = at(params.q, call.q.row_stride * bytes);
            turn.positions = at(params.positions, size_of::<i32>());
            turn.kv.entry_offsets =
                at(params.kv.entry_offsets, call.kv.tables() * size_of::<i32>());
            turn.out = at(params.out, states * call.kv.geometry.head_dim * bytes);
            turn.lse = at(params.lse, states * size_of::<f32>());
            // SAFETY: the tensors of these requests are parts of the whole ones.
            unsafe {
                if let Some(tiled) = tiled {
                    let turn = TiledAttendParams { attend: turn, ..tiled };
                    self.start("attend_decode_sm90", kernel, grid, call.stream, &turn)
                } else {
                    self.start("attend_decode", kernel, grid, call.stream, &turn)
                }
            }?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`CudaBackend::attend`].
    unsafe fn prefill(
        &self,
        call: &AttendLaunch<'_>,
        mut params: AttendParams,
        (kernel, grid): (&str, Grid),
        hopper: bool,
    ) -> Result<(), CudaError> {
        params.splits = grid.blocks[2];
        // SAFETY: the caller's promise.
        unsafe {
            if hopper {
                let params = tiled(call, params, is_tall(&call.kv.geometry))?;
                self.start("attend_prefill_sm90", kernel, grid, call.stream, &params)?;
            } else {
                self.start("attend_prefill", kernel, grid, call.stream, &params)?;
            }
            if params.splits == 1 {
                return Ok(());
            }
            let merge = format!("attend_merge_{}", name_of(call.dtype));
            self.start("attend_prefill", &merge, Plan::warps(call)?, call.stream, &params)
        }
    }
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

/// The cache as the copy engine sees it, [page, 8-token group, block of columns, 8, columns] with
/// up to 128 bytes of columns, and the elements between its pages: whatever divides all distances
/// between pages' keys and values. A copy takes all columns of 16 tokens, or a `tall` one a block
/// of columns of all tokens.
fn tiled(
    call: &AttendLaunch<'_>,
    attend: AttendParams,
    tall: bool,
) -> Result<TiledAttendParams, CudaError> {
    let geometry = &call.kv.geometry;
    let unit = [geometry.head_stride, geometry.value_offset]
        .into_iter()
        .fold(geometry.block_stride, greatest_common_divisor)
        .max(1);
    let bytes = bytes_of(call.kv.dtype) as u64;
    let number = |count: usize| count as u64;
    let columns = geometry.head_dim.min(BLOCK_BYTES / bytes_of(call.kv.dtype));
    let (groups, blocks) = (geometry.page_tokens / 8, geometry.head_dim / columns);
    let narrow_of = |count: usize| narrow("head_dim", count);
    let token_bytes = number(geometry.token_stride) * bytes;
    let copied = if tall { (1, groups) } else { (blocks, 2) };
    let pages = TensorMap::tiled(&Tiled {
        address: call.kv.cache.address,
        dtype: call.kv.dtype,
        dims: &[
            number(columns),
            8,
            number(blocks),
            number(groups),
            number(call.kv.cache.len.div_ceil(unit)),
        ],
        strides_bytes: &[
            token_bytes,
            number(columns) * bytes,
            8 * token_bytes,
            number(unit) * bytes,
        ],
        copied: &[narrow_of(columns)?, 8, narrow_of(copied.0)?, narrow_of(copied.1)?, 1],
    })?;
    Ok(TiledAttendParams {
        pages,
        attend,
        page_unit: long("page", unit)?,
        block_units: narrow("page", geometry.block_stride / unit)?,
        head_units: narrow("page", geometry.head_stride / unit)?,
        value_units: narrow("page", geometry.value_offset / unit)?,
    })
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

fn params_of(call: &AttendLaunch<'_>) -> Result<AttendParams, CudaError> {
    let geometry = &call.kv.geometry;
    let (rows, heads) = (call.rows, call.query_heads);
    if geometry.kv_heads == 0 || !heads.is_multiple_of(geometry.kv_heads) {
        let expected = format!("a multiple of {} KV heads", geometry.kv_heads);
        return Err(CudaError::invalid("query heads", expected, heads));
    }
    let cap = call.softcap.unwrap_or(1.0);
    let scale = call.scale * call.kv.scales.key;
    if !(scale.is_finite() && cap.is_finite() && cap > 0.0) {
        let got = format!("{scale} and {cap}");
        return Err(CudaError::invalid(
            "scale and softcap",
            "finite numbers, softcap above 0",
            got,
        ));
    }
    call.q.expect("q", (rows, heads, geometry.head_dim))?;
    call.positions.expect("positions", rows)?;
    call.out.expect_size("out", &[rows, heads, geometry.head_dim])?;
    call.lse.expect_size("lse", &[rows, heads])?;
    match &call.row_offsets {
        Some(offsets) => offsets.expect("row_offsets", call.requests + 1)?,
        None if rows == call.requests => {}
        None => return Err(CudaError::invalid("rows", call.requests, rows)),
    }
    Ok(AttendParams {
        kv: call.kv.params(call.requests)?,
        q: call.q.tensor.address,
        positions: call.positions.address,
        row_offsets: call.row_offsets.map_or(0, |offsets| offsets.address),
        out: call.out.address,
        lse: call.lse.address,
        partial: call.floats.address,
        counters: call.counters.address,
        q_row_stride: long("q", call.q.row_stride)?,
        q_head_stride: long("q", call.q.head_stride)?,
        scale,
        softcap: call.softcap.unwrap_or(0.0),
        value_scale: call.kv.scales.value,
        rows: narrow("rows", rows)?,
        requests: narrow("requests", call.requests)?,
        query_heads: narrow("query heads", heads)?,
        splits: 1,
        run_factor: 0,
        head_factor: 0,
        chunk_factor: 0,
        block_factor: 0,
    })
}
