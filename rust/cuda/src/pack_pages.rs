//! Launch of `pack_pages.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::{PackedFormat, PackedKind};

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceTensor, blocks_of, long, name_of, narrow};
use crate::params::PackPagesParams;

/// `kThreads` of the kernels.
const THREADS: u32 = 128;
/// `kMaxDim` of the kernels.
const MAX_HEAD_DIM: usize = 256;
/// Bytes that a load of exact pages, or a page of packed ones, begins on a boundary of.
const ALIGNMENT: u64 = 16;

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackDirection {
    /// Exact pages into packed ones.
    Pack,
    /// Packed pages into exact ones.
    Unpack,
}

/// Pages packed or unpacked: `kvweave_core::ops::Packs`, whose checks are the caller's where the
/// rows are on the host. The kernel skips rows that point outside either side.
#[derive(Clone, Copy, Debug)]
pub struct PackPagesLaunch {
    /// Which way.
    pub direction: PackDirection,
    /// Exact pages [pages, 2, P', D].
    pub cache: DeviceTensor,
    /// Their elements: f32, bf16 or f16.
    pub dtype: KvDtype,
    /// Bytes of packed pages.
    pub packed: DeviceTensor,
    /// What they are.
    pub format: PackedFormat,
    /// i32 [rows, 2 + P / P'], contiguous.
    pub packs: DeviceTensor,
    /// Rows of it.
    pub rows: usize,
    /// P', which divides P.
    pub page_tokens: usize,
    /// Pages of a block.
    pub pages: usize,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the packing on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, `stream` is a stream of this device, and no block is written twice.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Unsupported` for what the kernel
    /// does not do, `Driver` when the launch fails.
    pub unsafe fn pack_pages(&self, call: &PackPagesLaunch) -> Result<(), CudaError> {
        let params = params_of(call)?;
        let jobs = call.rows.saturating_mul(call.pages);
        if jobs == 0 {
            return Ok(());
        }
        let grid = Grid {
            blocks: [blocks_of("pages to pack", jobs)?, 1, 1],
            threads: THREADS,
            shared_bytes: 0,
        };
        let way = match call.direction {
            PackDirection::Pack => "pack",
            PackDirection::Unpack => "unpack",
        };
        let (dtype, scales) = (name_of(call.dtype), call.format.scales().name());
        let kernel = format!("{way}_pages_{dtype}_{scales}");
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("pack_pages", &kernel), grid, call.stream, &params) }
    }
}

fn params_of(call: &PackPagesLaunch) -> Result<PackPagesParams, CudaError> {
    let format = &call.format;
    let (tokens, dim) = (format.page_tokens(), format.head_dim());
    if format.kind() != PackedKind::Int4 {
        return Err(CudaError::unsupported("kind", "int4", format.kind().name()));
    }
    if dim > MAX_HEAD_DIM {
        return Err(CudaError::unsupported("head_dim", format!("up to {MAX_HEAD_DIM}"), dim));
    }
    if call.dtype.is_quantised() {
        return Err(CudaError::invalid("cache", "f32, bf16 or f16 pages", name_of(call.dtype)));
    }
    if call.page_tokens == 0 || !tokens.is_multiple_of(call.page_tokens) {
        let expected = format!("a divisor of {tokens}");
        return Err(CudaError::invalid("page_tokens", expected, call.page_tokens));
    }
    for (what, tensor) in [("cache", call.cache), ("packed pages", call.packed)] {
        if !tensor.address.is_multiple_of(ALIGNMENT) {
            let got = format!("an address {} bytes past one", tensor.address % ALIGNMENT);
            let expected = format!("a boundary of {ALIGNMENT} bytes");
            return Err(CudaError::unsupported(what, expected, got));
        }
    }
    let width = 2 + tokens / call.page_tokens;
    call.packs.expect_size("packs", &[call.rows, width])?;
    let page = 2 * call.page_tokens * dim;
    Ok(PackPagesParams {
        cache: call.cache.address,
        packed: call.packed.address,
        packs: call.packs.address,
        cache_pages: long("cache", call.cache.len / page)?,
        packed_pages: long("packed pages", call.packed.len / format.page_bytes())?,
        width: narrow("packs", width)?,
        pages: narrow("pages", call.pages)?,
        source_tokens: narrow("page_tokens", call.page_tokens)?,
        page_tokens: narrow("page_tokens", tokens)?,
        head_dim: narrow("head_dim", dim)?,
        page_bytes: narrow("page_tokens", format.page_bytes())?,
    })
}
