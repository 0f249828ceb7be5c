//! Launch of `estimate_pages.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::Pairing;

use crate::backend::CudaBackend;
use crate::choice_params::EstimatePagesParams;
use crate::error::CudaError;
use crate::ffi::{DeviceBuffer, Grid};
use crate::operands::{DeviceRows, DeviceTensor, blocks_of, long, name_of, narrow};
use crate::paged::DeviceReach;

const THREADS: u32 = 256;
/// Query heads of a thread block: `kQueries` of the kernel.
const QUERIES: usize = 4;
/// Splits of a row at most: `kSplits` of the kernel.
const SPLITS: usize = 32;
/// Thread blocks that keep a device busy, some of which find nothing to do.
const BLOCKS: usize = 2048;
/// Largest head dims of the kernels.
const DIMS: [usize; 3] = [64, 128, 256];

/// Attention over some pages, and an estimate of the others: `kvweave_core::ops::EstimatePages`,
/// whose checks are the caller's where the tables are on the host. The kernel gives no term to
/// entries whose page has no means; offsets are taken as they are.
#[derive(Clone, Copy, Debug)]
pub struct EstimatePagesLaunch<'a> {
    /// [B, H, D].
    pub q: DeviceRows,
    /// Elements of queries, means, and what was attended to.
    pub dtype: KvDtype,
    /// B.
    pub requests: usize,
    /// H.
    pub query_heads: usize,
    /// G.
    pub kv_heads: usize,
    /// D.
    pub head_dim: usize,
    /// [B, H, D], contiguous.
    pub attended: DeviceTensor,
    /// f32 [B, H].
    pub attended_lse: DeviceTensor,
    /// [pages, 2, D], contiguous, on a boundary of 16 bytes.
    pub means: DeviceTensor,
    /// i32 [N, 5], contiguous.
    pub entries: DeviceTensor,
    /// i32 [B·R + 1].
    pub entry_offsets: DeviceTensor,
    /// Table and page of each head, where they differ.
    pub reach: Option<DeviceReach<'a>>,
    /// i32 [M, 5], contiguous: entries that were read.
    pub read: DeviceTensor,
    /// i32 [B·R + 1] of these.
    pub read_offsets: DeviceTensor,
    /// Table of each head among these, where they differ.
    pub read_reach: Option<DeviceReach<'a>>,
    /// The layer attended to.
    pub layer: usize,
    /// f32 [layers, pairs].
    pub inv_freq: &'a DeviceBuffer,
    /// rotary_dim / 2.
    pub pairs: usize,
    /// How elements pair up.
    pub pairing: Pairing,
    /// Factor of a logit.
    pub scale: f32,
    /// Soft cap, above 0.
    pub softcap: Option<f32>,
    /// [B, H, D], contiguous.
    pub out: DeviceTensor,
    /// f32 [B, H].
    pub lse: DeviceTensor,
    /// f32 [at least `EstimatePlan::floats`], of any value.
    pub floats: DeviceTensor,
    /// i32 [at least `EstimatePlan::counters`], 0 before and after.
    pub counters: DeviceTensor,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

/// How a call is cut, by its sizes alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EstimatePlan {
    /// The head dim of the kernel.
    dim: usize,
    /// Query heads of a KV head, as parts that are a thread block's each.
    chunks: usize,
    /// Rows of such parts.
    items: usize,
    /// Thread blocks of an item.
    blocks: usize,
}

impl EstimatePlan {
    /// How a call is cut.
    ///
    /// # Errors
    /// `InvalidArgument` for heads that do not belong together, `Unsupported` for a head dim that
    /// the kernels do not take.
    pub fn of(call: &EstimatePagesLaunch<'_>) -> Result<Self, CudaError> {
        let EstimatePagesLaunch { requests, query_heads, kv_heads, head_dim, .. } = *call;
        if kv_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            let expected = format!("a multiple of {kv_heads} KV heads");
            return Err(CudaError::invalid("query heads", expected, query_heads));
        }
        let dim = DIMS.into_iter().find(|&dim| head_dim <= dim);
        let dim = dim.filter(|_| head_dim > 0 && head_dim.is_multiple_of(8)).ok_or_else(|| {
            let expected = format!("a multiple of 8 up to {}", DIMS[DIMS.len() - 1]);
            CudaError::unsupported("head_dim", expected, head_dim)
        })?;
        let chunks = (query_heads / kv_heads).div_ceil(QUERIES);
        let items = requests.saturating_mul(kv_heads).saturating_mul(chunks);
        let blocks = (BLOCKS / items.max(1)).clamp(1, SPLITS).next_power_of_two();
        Ok(Self { dim, chunks, items, blocks })
    }

    /// Numbers of workspace of any value.
    #[must_use]
    pub fn floats(&self) -> usize {
        self.items.saturating_mul(SPLITS * QUERIES * (self.dim + 2))
    }

    /// Numbers of workspace that are 0 between calls.
    #[must_use]
    pub fn counters(&self) -> usize {
        self.items
    }
}

impl CudaBackend {
    /// Puts the call on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, `stream` is a stream of this device, the plan is the call's, and counters
    /// are 0 and no other call's meanwhile.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn estimate_pages(
        &self,
        call: &EstimatePagesLaunch<'_>,
        plan: &EstimatePlan,
    ) -> Result<(), CudaError> {
        let params = params_of(call, plan)?;
        let blocks = blocks_of("pages to estimate", plan.items.saturating_mul(plan.blocks))?;
        if blocks == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared_bytes: 0 };
        let name = format!("estimate_pages_{}_{}", name_of(call.dtype), plan.dim);
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("estimate_pages", &name), grid, call.stream, &params) }
    }
}

fn params_of(
    call: &EstimatePagesLaunch<'_>,
    plan: &EstimatePlan,
) -> Result<EstimatePagesParams, CudaError> {
    let EstimatePagesLaunch { requests, query_heads, kv_heads, head_dim, .. } = *call;
    if 2 * call.pairs > head_dim {
        return Err(CudaError::invalid("rotary_dim", head_dim, 2 * call.pairs));
    }
    let ends = |reach: Option<DeviceReach<'_>>| {
        let tables = reach.map_or(1, |reach| reach.tables);
        (tables, requests.saturating_mul(tables).saturating_add(1))
    };
    let ((tables, offsets), (read_tables, read_offsets)) =
        (ends(call.reach), ends(call.read_reach));
    let rows = (requests, query_heads, head_dim);
    call.q.expect("q", rows)?;
    call.entry_offsets.expect("entry_offsets", offsets)?;
    call.read_offsets.expect("read_offsets", read_offsets)?;
    for (what, tensor) in [("attended", call.attended), ("out", call.out)] {
        tensor.expect_size(what, &[requests, query_heads, head_dim])?;
    }
    for (what, tensor) in [("lse of attended", call.attended_lse), ("lse", call.lse)] {
        tensor.expect_size(what, &[requests, query_heads])?;
    }
    call.floats.expect("floats of workspace", plan.floats())?;
    call.counters.expect("counters of workspace", plan.counters())?;
    let first_rank = if call.reach.is_some() { 0 } else { call.layer.saturating_mul(kv_heads) };
    let row = call.layer * call.pairs * size_of::<f32>();
    Ok(EstimatePagesParams {
        q: call.q.tensor.address,
        attended: call.attended.address,
        attended_lse: call.attended_lse.address,
        means: call.means.address,
        entries: call.entries.address,
        entry_offsets: call.entry_offsets.address,
        heads: call.reach.map_or(0, |reach| reach.heads.address()),
        read: call.read.address,
        read_offsets: call.read_offsets.address,
        read_heads: call.read_reach.map_or(0, |reach| reach.heads.address()),
        inv_freq: call.inv_freq.address() + row as u64,
        out: call.out.address,
        lse: call.lse.address,
        partial: call.floats.address,
        counters: call.counters.address,
        q_row_stride: long("q", call.q.row_stride)?,
        q_head_stride: long("q", call.q.head_stride)?,
        pages: long("means", call.means.len / (2 * head_dim))?,
        tables: narrow("tables", tables)?,
        read_tables: narrow("tables", read_tables)?,
        kv_heads: narrow("kv_heads", kv_heads)?,
        group: narrow("query heads", query_heads / kv_heads)?,
        chunks: narrow("query heads", plan.chunks)?,
        blocks: narrow("thread blocks", plan.blocks)?,
        head_dim: narrow("head_dim", head_dim)?,
        pairs: narrow("rotary_dim", call.pairs)?,
        interleaved: u32::from(call.pairing == Pairing::Interleaved),
        first_rank: narrow("layer", first_rank)?,
        scale: call.scale,
        softcap: call.softcap.unwrap_or(0.0),
    })
}
