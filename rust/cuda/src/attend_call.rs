//! A call of attention, and the workspace that it needs.

use kvweave_core::KvDtype;

use crate::operands::{DeviceRows, DeviceTensor};
use crate::paged::DeviceKv;

/// Attention of rows over paged keys and values: `kvweave_core::ops::AttendPrefill`, or with
/// `row_offsets` left out `AttendDecode`.
#[derive(Clone, Copy, Debug)]
pub struct AttendLaunch<'a> {
    /// Keys and values of all requests.
    pub kv: DeviceKv<'a>,
    /// [R, H, D].
    pub q: DeviceRows,
    /// Elements of `q` and `out`: the cache's, or any others over fp8.
    pub dtype: KvDtype,
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
    /// f32, as many as the call's plan says, on a 16-byte boundary; what they hold before and
    /// after is no matter.
    pub floats: DeviceTensor,
    /// i32, as many as the call's plan says: all 0 before the call, and again after it.
    pub counters: DeviceTensor,
    /// B.
    pub requests: usize,
    /// H.
    pub query_heads: usize,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

/// What a call needs of workspace: see [`AttendLaunch::floats`] and [`AttendLaunch::counters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendWorkspace {
    /// f32.
    pub floats: usize,
    /// i32.
    pub counters: usize,
}

impl AttendLaunch<'_> {
    /// Query heads that share a KV head.
    pub(crate) fn group(&self) -> usize {
        self.query_heads / self.kv.geometry.kv_heads.max(1)
    }
}
