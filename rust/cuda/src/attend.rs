//! Launch of attention over pages: which kernel does a call, and how its work is cut.

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{self, Grid};
use crate::operands::{DeviceRows, DeviceTensor, blocks_of, long, name_of, narrow};
use crate::paged::DeviceKv;
use crate::params::AttendParams;

/// Warps of a thread block of the plain kernel, each with one (row, query head).
const PLAIN_WARPS: usize = 4;
const WARP: u32 = 32;

/// Attention of rows over paged keys and values: `kvweave_core::ops::AttendPrefill`, or with
/// `row_offsets` left out `AttendDecode`.
#[derive(Clone, Copy, Debug)]
pub struct AttendLaunch<'a> {
    /// Keys and values of all requests.
    pub kv: DeviceKv<'a>,
    /// [R, H, D], of the cache's dtype.
    pub q: DeviceRows,
    /// i32 [R].
    pub positions: DeviceTensor,
    /// i32 [B + 1]; `None`: row b is request b.
    pub row_offsets: Option<DeviceTensor>,
    /// [R, H, D], contiguous.
    pub out: DeviceTensor,
    /// f32 [R, H], contiguous.
    pub lse: DeviceTensor,
    /// Factor on qᵀk.
    pub scale: f32,
    /// Soft cap c > 0.
    pub softcap: Option<f32>,
    /// R.
    pub rows: usize,
    /// B.
    pub requests: usize,
    /// H.
    pub query_heads: usize,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
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
        let states = call.rows * call.query_heads;
        let grid = Grid {
            blocks: [blocks_of("rows", states.div_ceil(PLAIN_WARPS))?, 1, 1],
            threads: PLAIN_WARPS as u32 * WARP,
            shared_bytes: 0,
        };
        let name = format!("attend_plain_{}", name_of(call.kv.dtype));
        let kernel = self.kernel("attend_plain", &name)?;
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { ffi::launch(&self.context, &kernel, grid, call.stream, &params) }
    }
}

fn params_of(call: &AttendLaunch<'_>) -> Result<AttendParams, CudaError> {
    let geometry = &call.kv.geometry;
    let (rows, heads) = (call.rows, call.query_heads);
    if geometry.kv_heads == 0 || !heads.is_multiple_of(geometry.kv_heads) {
        let expected = format!("a multiple of {} KV heads", geometry.kv_heads);
        return Err(CudaError::invalid("query heads", expected, heads));
    }
    let cap = call.softcap.unwrap_or(1.0);
    if !(call.scale.is_finite() && cap.is_finite() && cap > 0.0) {
        let got = format!("{} and {cap}", call.scale);
        return Err(CudaError::invalid(
            "scale and softcap",
            "finite numbers, softcap above 0",
            got,
        ));
    }
    call.q.expect("q", (rows, heads, geometry.head_dim))?;
    call.positions.expect("positions", rows)?;
    call.out.expect("out", rows * heads * geometry.head_dim)?;
    call.lse.expect("lse", rows * heads)?;
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
        partial: 0,
        counters: 0,
        q_row_stride: long("q", call.q.row_stride)?,
        q_head_stride: long("q", call.q.head_stride)?,
        scale: call.scale,
        softcap: call.softcap.unwrap_or(0.0),
        rows: narrow("rows", rows)?,
        requests: narrow("requests", call.requests)?,
        query_heads: narrow("query heads", heads)?,
        splits: 1,
    })
}
