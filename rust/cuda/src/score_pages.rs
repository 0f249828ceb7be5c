//! Launch of `score_pages.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::{PageScore, Pairing, SharedScore, fp8_vectors};

use crate::backend::CudaBackend;
use crate::bounds::BoundNumbers;
use crate::choice_params::ScorePagesParams;
use crate::error::CudaError;
use crate::ffi::{DeviceBuffer, Grid};
use crate::operands::{DeviceRows, DeviceTensor, blocks_of, long, name_of, narrow};
use crate::paged::DeviceReach;

const THREADS: u32 = 256;
/// Of a kernel that multiplies by tensor cores: `kTileThreads`.
const TILE_THREADS: u32 = 128;
/// Query heads of a KV head that it has room for in products: `kTileQueries` · `kMostTiles`.
const TILED_QUERIES: usize = 16;
/// Queries of one product: `kTileQueries`.
const TILE_QUERIES: usize = 4;
/// Entries that are scored together: `kWindow` of the kernel.
const WINDOW: usize = 64;
/// Windows that a thread block has at most: what it begins with takes it as long as one of them.
const MOST_WINDOWS: usize = 16;
/// Thread blocks of a processor, beyond which each has more windows.
const BLOCKS: usize = 4;
/// Rows whose windows a thread block counts: `kMostRows` of the kernel.
const SHARED_ROWS: usize = 2048;
/// Largest head dims of the kernels.
const DIMS: [usize; 3] = [64, 128, 256];

/// Scores of pages by their bounds: `kvweave_core::ops::ScorePages`, whose checks are the caller's
/// where the tables are on the host. The kernel gives −∞ to entries whose page has no bounds, and
/// leaves out those beyond `width`; offsets are taken as they are.
#[derive(Clone, Copy, Debug)]
pub struct ScorePagesLaunch<'a> {
    /// [B, H, D].
    pub q: DeviceRows,
    /// Its elements.
    pub dtype: KvDtype,
    /// B.
    pub requests: usize,
    /// H.
    pub query_heads: usize,
    /// G.
    pub kv_heads: usize,
    /// D.
    pub head_dim: usize,
    /// [pages, vectors, D], contiguous, on a boundary of 16 bytes.
    pub bounds: DeviceTensor,
    /// What they are: `Keys` have the queries' elements.
    pub numbers: BoundNumbers,
    /// i32 [N, 5], contiguous.
    pub entries: DeviceTensor,
    /// i32 [B·R + 1].
    pub entry_offsets: DeviceTensor,
    /// The layer scored.
    pub layer: usize,
    /// Table and page of each head, where they differ.
    pub reach: Option<DeviceReach<'a>>,
    /// f32 [layers, pairs].
    pub inv_freq: &'a DeviceBuffer,
    /// rotary_dim / 2.
    pub pairs: usize,
    /// How elements pair up.
    pub pairing: Pairing,
    /// Factor of a score.
    pub scale: f32,
    /// Soft cap, above 0.
    pub softcap: Option<f32>,
    /// What a score is made of.
    pub score: PageScore,
    /// How query heads share it.
    pub shared: SharedScore,
    /// f32 [B, G, width], contiguous.
    pub scores: DeviceTensor,
    /// S.
    pub width: usize,
    /// i32 [B, G].
    pub counts: DeviceTensor,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the scores on the stream: −∞ behind those of a row. Nothing is waited for, nothing
    /// allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, and `stream` is a stream of this device.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Unsupported` for what the kernel
    /// does not do, `Driver` when the launch fails.
    pub unsafe fn score_pages(&self, call: &ScorePagesLaunch<'_>) -> Result<(), CudaError> {
        let params = params_of(call, self.processors() as usize)?;
        let rows = call.requests.saturating_mul(call.kv_heads);
        if rows == 0 {
            return Ok(());
        }
        let blocks = if params.rows > 0 {
            shared_blocks(rows, windows_of(call.width), self.processors() as usize)
        } else {
            rows.saturating_mul(params.chunks as usize)
        };
        let blocks = blocks_of("pages to score", blocks)?;
        let shared_bytes = shared_bytes_of(call, params.group as usize)?;
        let grid = Grid {
            blocks: [blocks, 1, 1],
            threads: if is_tiled(call) { TILE_THREADS } else { THREADS },
            shared_bytes: narrow("query heads of a KV head", shared_bytes)?,
        };
        let kind = match (call.numbers, call.score) {
            (BoundNumbers::Keys, _) => "keys",
            (BoundNumbers::F32, PageScore::MinMax) => "minmax",
            (BoundNumbers::F32, PageScore::Mean) => "mean",
            (BoundNumbers::Fp8 { .. }, PageScore::MinMax) => "fp8_minmax",
            (BoundNumbers::Fp8 { .. }, PageScore::Mean) => "fp8_mean",
        };
        let name = format!("score_pages_{}_{}_{kind}", name_of(call.dtype), dim_of(call)?);
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("score_pages", &name), grid, call.stream, &params) }
    }
}

/// Whether a call's kernel multiplies by tensor cores: bounds and queries have few enough bits.
fn is_tiled(call: &ScorePagesLaunch<'_>) -> bool {
    call.dtype != KvDtype::F32 && !matches!(call.numbers, BoundNumbers::F32)
}

/// Shared memory for the queries of a KV head: as they are summed up, and as they are multiplied.
fn shared_bytes_of(call: &ScorePagesLaunch<'_>, group: usize) -> Result<usize, CudaError> {
    let plain = group.saturating_mul(call.head_dim).saturating_mul(size_of::<f32>());
    if !is_tiled(call) || group > TILED_QUERIES {
        return Ok(plain);
    }
    let vectors = if call.score == PageScore::Mean { 1 } else { 2 };
    let row = (dim_of(call)? * vectors + 32) * size_of::<u16>();
    Ok(plain.max(group.div_ceil(TILE_QUERIES) * TILE_QUERIES * 2 * row))
}

/// The head dim of the kernel that takes a call's.
fn dim_of(call: &ScorePagesLaunch<'_>) -> Result<usize, CudaError> {
    let dim = DIMS.into_iter().find(|&dim| call.head_dim <= dim);
    dim.filter(|_| call.head_dim > 0 && call.head_dim.is_multiple_of(8)).ok_or_else(|| {
        let expected = format!("a multiple of 8 up to {}", DIMS[DIMS.len() - 1]);
        CudaError::unsupported("head_dim", expected, call.head_dim)
    })
}

/// The kernel's params on a device of so many processors.
fn params_of(
    call: &ScorePagesLaunch<'_>,
    processors: usize,
) -> Result<ScorePagesParams, CudaError> {
    let ScorePagesLaunch { requests, query_heads, kv_heads, head_dim, width, .. } = *call;
    dim_of(call)?;
    if kv_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
        let expected = format!("a multiple of {kv_heads} KV heads");
        return Err(CudaError::invalid("query heads", expected, query_heads));
    }
    if 2 * call.pairs > head_dim {
        return Err(CudaError::invalid("rotary_dim", head_dim, 2 * call.pairs));
    }
    expect_score(call)?;
    let tables = call.reach.map_or(1, |reach| reach.tables);
    call.q.expect("q", (requests, query_heads, head_dim))?;
    let spans = requests.saturating_mul(tables);
    call.entry_offsets.expect("entry_offsets", spans.saturating_add(1))?;
    call.scores.expect_size("scores", &[requests, kv_heads, width])?;
    call.counts.expect_size("counts", &[requests, kv_heads])?;
    if width > i32::MAX.cast_unsigned() as usize {
        return Err(CudaError::invalid("width of scores", "a 31-bit number", width));
    }
    let first_rank = if call.reach.is_some() { 0 } else { call.layer.saturating_mul(kv_heads) };
    let row = call.layer * call.pairs * size_of::<f32>();
    let rows = requests.saturating_mul(kv_heads);
    let windows = windows_of(width);
    let chunks = if is_tiled(call) { chunks_of(rows, windows, processors) } else { windows };
    let is_shared = is_tiled(call) && can_share(rows, windows);
    let pages = call.bounds.len / (call.numbers.vectors() * head_dim);
    Ok(ScorePagesParams {
        q: call.q.tensor.address,
        bounds: call.bounds.address,
        scales: call.numbers.scales(pages)?,
        entries: call.entries.address,
        entry_offsets: call.entry_offsets.address,
        heads: call.reach.map_or(0, |reach| reach.heads.address()),
        inv_freq: call.inv_freq.address() + row as u64,
        scores: call.scores.address,
        counts: call.counts.address,
        q_row_stride: long("q", call.q.row_stride)?,
        q_head_stride: long("q", call.q.head_stride)?,
        pages: long("bounds", pages)?,
        tables: narrow("tables", tables)?,
        kv_heads: narrow("kv_heads", kv_heads)?,
        group: narrow("query heads", query_heads / kv_heads)?,
        head_dim: narrow("head_dim", head_dim)?,
        pairs: narrow("rotary_dim", call.pairs)?,
        interleaved: u32::from(call.pairing == Pairing::Interleaved),
        first_rank: narrow("layer", first_rank)?,
        width: narrow("width of scores", width)?,
        rows: if is_shared { narrow("rows", rows)? } else { 0 },
        chunks: narrow("width of scores", chunks)?,
        summed: u32::from(call.shared == SharedScore::Sum),
        scale: call.scale,
        softcap: call.softcap.unwrap_or(0.0),
    })
}

/// Windows of a row of scores of this width.
fn windows_of(width: usize) -> usize {
    width.div_ceil(WINDOW).max(1)
}

/// Whether thread blocks count the windows of all rows, each of which has up to so many.
fn can_share(rows: usize, windows: usize) -> bool {
    rows <= SHARED_ROWS && rows.saturating_mul(windows) <= i32::MAX.cast_unsigned() as usize
}

/// Thread blocks that share the windows of all rows: one for each, but no more than a device holds
/// at once, as each of them counts all rows.
fn shared_blocks(rows: usize, windows: usize, processors: usize) -> usize {
    rows.saturating_mul(windows).min(BLOCKS * processors.max(1))
}

/// Thread blocks of a row of so many windows: as many, but where they are more than fill a device.
/// They share the row evenly.
fn chunks_of(rows: usize, windows: usize, processors: usize) -> usize {
    let all = rows.saturating_mul(windows);
    let of_block = all.div_ceil(BLOCKS * processors.max(1)).clamp(1, MOST_WINDOWS);
    let chunks = windows.div_ceil(of_block);
    // The kernel's windows of a block may need fewer blocks.
    windows.div_ceil(windows.div_ceil(chunks))
}

/// Proves that the call's score can be made of its bounds.
fn expect_score(call: &ScorePagesLaunch<'_>) -> Result<(), CudaError> {
    match call.numbers {
        BoundNumbers::Keys if call.score == PageScore::Mean || call.dtype == KvDtype::F32 => {
            let expected = "f32, which have means too";
            Err(CudaError::unsupported("bounds", expected, "least and greatest keys alone"))
        }
        BoundNumbers::Fp8 { score, .. } if score != call.score => {
            let vectors = |score| format!("{} vectors a page in fp8", fp8_vectors(score));
            Err(CudaError::invalid("bounds", vectors(call.score), vectors(score)))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_WINDOWS, SHARED_ROWS, can_share, chunks_of, shared_blocks};

    #[test]
    fn thread_blocks_that_share_windows_are_no_more_than_fill_a_device() {
        assert_eq!(shared_blocks(2, 3, 132), 6);
        assert_eq!(shared_blocks(144, 32, 132), 528);
        assert_eq!(shared_blocks(64, 128, 132), 528);
        assert_eq!(shared_blocks(64, 1024, 132), 528);
        assert_eq!(shared_blocks(1, 1, 0), 1);
        assert!(can_share(SHARED_ROWS, 1 << 19) && !can_share(SHARED_ROWS, 1 << 20));
        assert!(!can_share(SHARED_ROWS + 1, 1) && !can_share(2, usize::MAX));
    }

    #[test]
    fn a_device_is_filled_before_thread_blocks_have_several_windows() {
        assert_eq!(chunks_of(8, 66, 132), 66);
        assert_eq!(chunks_of(8, 67, 132), 34);
        assert_eq!(chunks_of(320, 10, 132), 2);
        assert_eq!(chunks_of(64, 128, 132), 8);
        assert_eq!(chunks_of(1 << 20, 2, 0), 1);
        for windows in 1..200 {
            let chunks = chunks_of(usize::MAX, windows, 132);
            let of_block = windows.div_ceil(chunks);
            assert!(of_block <= MOST_WINDOWS && of_block * chunks >= windows);
            assert!(of_block * (chunks - 1) < windows);
        }
    }
}
