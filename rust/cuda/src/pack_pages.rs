//! Launch of `pack_pages.cu`, `pack_top_r.cu`, `pack_planes.cu` and `restore_pages.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::{PackedFormat, PackedKind};

use crate::backend::CudaBackend;
use crate::bases::{DeviceBases, bases_params, top_r_params};
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceTensor, blocks_of, long, name_of, narrow};
use crate::params::PackPagesParams;

/// `kThreads` of the kernels of INT4 and INT8 pages.
const THREADS: u32 = 256;
/// Of the kernels that pack in a basis: `kPackTokens`, `kVectorBytes`, `kStep` and `kGap` of
/// `basis_numbers.cuh`.
const PACKED: Packed = Packed { tokens: 64, vector_bytes: 3, step: 32, gap: 16 };
/// The largest head size whose rows these have in registers; others have kernels of their own.
const HELD_HEAD_DIM: usize = 128;
/// Of those that unpack: `kThreads`, `kTokens`, `kTokenPitch`, `kDepth`, `kWidePitch` of
/// `pack_tiles.cuh`.
const UNPACKED: Tile =
    Tile { threads: 256, tokens: 32, token_pitch: 36, depth: 16, wide_pitch: 132 };
/// Of `restore_pages.cu`: `kMaxDim`, `kPitch`, `kTokens`, `kTokenBytes`, and what a product's rows
/// and a page's tokens are a multiple of.
const RESTORED: Restored =
    Restored { dim: 128, pitch: 136, tokens: 64, token_bytes: 272, rows: 16 };
/// Thread blocks that a launch of it, or of one that packs in a basis, has at most, or about as
/// many as a row's pages have sides: two for each of 128 multiprocessors, as each brings directions
/// near.
const BLOCKS_WITH_ROWS: usize = 256;
/// Of a page, each of which has thread blocks of its own: keys and values.
const SIDES: usize = 2;
/// `kMaxDim` of the kernels.
const MAX_HEAD_DIM: usize = 256;
/// Bytes that a load of exact pages, or a page of packed ones, begins on a boundary of.
const ALIGNMENT: u64 = 16;

/// What a thread block that packs has in shared memory.
struct Packed {
    tokens: usize,
    vector_bytes: usize,
    step: usize,
    gap: usize,
}

impl Packed {
    /// Bytes of a tile's vectors of so large elements, their integers, numbers and powers, and of
    /// their mean.
    fn shared_bytes(&self, dim: usize, element: usize) -> usize {
        let most = if dim > HELD_HEAD_DIM { MAX_HEAD_DIM } else { HELD_HEAD_DIM };
        let padded = dim.next_multiple_of(self.step);
        let integers = self.vector_bytes * (padded + self.gap);
        let floats = size_of::<f32>() * (padded + 4 + 1);
        self.tokens * (dim * element + self.gap + integers + floats) + size_of::<f32>() * most
    }
}

/// A thread block's part of a page that it unpacks, and how numbers lie in shared memory.
struct Tile {
    threads: u32,
    tokens: usize,
    token_pitch: usize,
    depth: usize,
    wide_pitch: usize,
}

impl Tile {
    /// Bytes of shared memory for products of so many numbers, with so many results a token.
    fn shared_bytes(&self, products: usize, results: usize) -> usize {
        let tokens = products.next_multiple_of(self.depth) * self.token_pitch;
        let part = self.depth * self.wide_pitch;
        size_of::<f32>() * (tokens + part + self.tokens * (results + 4))
    }
}

/// What a thread block of `restore_pages.cu` has in shared memory.
struct Restored {
    dim: usize,
    pitch: usize,
    tokens: usize,
    token_bytes: usize,
    rows: usize,
}

impl Restored {
    /// Directions twice, the codes of a tile, its packed bytes, its scales and the mean.
    const fn shared_bytes(&self) -> usize {
        let halves = (2 * self.dim + self.tokens) * self.pitch;
        let floats = self.tokens + self.dim;
        size_of::<u16>() * halves + self.tokens * self.token_bytes + size_of::<f32>() * floats
    }

    /// Whether it has kernels for such pages.
    fn takes(&self, call: &PackPagesLaunch) -> bool {
        let dim = call.format.head_dim();
        call.format.basis_rows().is_some()
            && matches!(call.dtype, KvDtype::Bf16 | KvDtype::F16)
            && dim.is_multiple_of(self.rows)
            && dim <= self.dim
            && call.format.page_tokens().is_multiple_of(self.rows)
    }
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackDirection {
    /// Exact pages into packed ones.
    Pack,
    /// Packed pages into exact ones.
    Unpack,
    /// The same, where sums need not run in the order of the definition: on tensor cores, where
    /// there is a kernel for it.
    Restore,
    /// Numbers of packed pages along the directions of their bases into exact ones.
    Spread,
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
    /// The bases of top-r pages and planes.
    pub bases: Option<DeviceBases>,
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
        let restores = call.direction == PackDirection::Restore && RESTORED.takes(call);
        let way = match call.direction {
            PackDirection::Pack => "pack",
            PackDirection::Restore if restores => "restore",
            PackDirection::Unpack | PackDirection::Restore => "unpack",
            PackDirection::Spread => "spread",
        };
        let (dtype, scales) = (name_of(call.dtype), call.format.scales().name());
        let packs = call.direction == PackDirection::Pack;
        let wide = if packs && call.format.head_dim() > HELD_HEAD_DIM { "_wide" } else { "" };
        let (source, kernel) = match call.format.kind() {
            PackedKind::TopR(_) => ("pack_top_r", format!("top_r_{dtype}_{scales}{wide}")),
            // What planes stand for needs no scales.
            PackedKind::Planes(_) => ("pack_planes", format!("planes_{dtype}{wide}")),
            kind => ("pack_pages", format!("pages_{}_{dtype}_{scales}", kind.name())),
        };
        let source = if restores { "restore_pages" } else { source };
        let grid = match call.format.basis_rows() {
            None => grid(jobs.saturating_mul(SIDES), THREADS, 0)?,
            Some(_) if restores => grid_with_rows(call, RESTORED.shared_bytes())?,
            Some(_) if packs => {
                let element = call.dtype.bytes() as usize;
                grid_with_rows(call, PACKED.shared_bytes(call.format.head_dim(), element))?
            }
            Some(_) => tiled_grid(call, jobs)?,
        };
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch((source, &format!("{way}_{kernel}")), grid, call.stream, &params) }
    }
}

fn grid(blocks: usize, threads: u32, shared_bytes: usize) -> Result<Grid, CudaError> {
    Ok(Grid {
        blocks: [blocks_of("pages to pack", blocks)?, 1, 1],
        threads,
        shared_bytes: narrow("head_dim", shared_bytes)?,
    })
}

/// A thread block for each tile of either side of a page. How many channels planes have says a
/// basis: all, at most.
fn tiled_grid(call: &PackPagesLaunch, jobs: usize) -> Result<Grid, CudaError> {
    let dim = call.format.head_dim();
    let channels = call.format.top_r().map_or(dim, |page| page.of().channels);
    let tiles = call.format.page_tokens().div_ceil(UNPACKED.tokens);
    let shared_bytes = UNPACKED.shared_bytes(channels, dim);
    grid(jobs.saturating_mul(SIDES * tiles), UNPACKED.threads, shared_bytes)
}

/// Thread blocks for each side of a row's pages, of which each takes some of the rows.
fn grid_with_rows(call: &PackPagesLaunch, shared_bytes: usize) -> Result<Grid, CudaError> {
    let sides = call.pages.saturating_mul(SIDES);
    let chunks = (BLOCKS_WITH_ROWS / sides).clamp(1, call.rows);
    Ok(Grid {
        blocks: [blocks_of("sides of pages", sides)?, narrow("packs", chunks)?, 1],
        threads: THREADS,
        shared_bytes: narrow("head_dim", shared_bytes)?,
    })
}

fn params_of(call: &PackPagesLaunch) -> Result<PackPagesParams, CudaError> {
    let format = &call.format;
    let (tokens, dim) = (format.page_tokens(), format.head_dim());
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
    let packed_pages = call.packed.len / format.page_bytes();
    Ok(PackPagesParams {
        cache: call.cache.address,
        packed: call.packed.address,
        packs: call.packs.address,
        cache_pages: long("cache", call.cache.len / page)?,
        packed_pages: long("packed pages", packed_pages)?,
        width: narrow("packs", width)?,
        pages: narrow("pages", call.pages)?,
        source_tokens: narrow("page_tokens", call.page_tokens)?,
        page_tokens: narrow("page_tokens", tokens)?,
        head_dim: narrow("head_dim", dim)?,
        page_bytes: narrow("page_tokens", format.page_bytes())?,
        rows: narrow("packs", call.rows)?,
        bases: bases_params(format, call.bases.as_ref(), packed_pages)?,
        top_r: top_r_params(format)?,
    })
}

#[cfg(test)]
mod tests {
    use kvweave_core::ops::{ROW_BITS, VECTOR_BITS};

    use super::*;

    #[test]
    fn a_tile_is_that_of_the_source() {
        let source = include_str!("../../../csrc/pack_tiles.cuh");
        for (name, number) in [
            ("kThreads", UNPACKED.threads as usize),
            ("kTokens", UNPACKED.tokens),
            ("kTokenPitch", UNPACKED.token_pitch),
            ("kDepth", UNPACKED.depth),
            ("kWidePitch", UNPACKED.wide_pitch),
        ] {
            assert!(source.contains(&format!("constexpr int {name} = {number};")), "{name}");
        }
        let source = include_str!("../../../csrc/basis_numbers.cuh");
        for (name, number) in [
            ("kPackTokens", PACKED.tokens),
            ("kVectorBytes", PACKED.vector_bytes),
            ("kStep", PACKED.step),
            ("kGap", PACKED.gap),
            ("kVectorBits", VECTOR_BITS as usize),
            ("kRowBits", ROW_BITS as usize),
        ] {
            assert!(source.contains(&format!("constexpr int {name} = {number};")), "{name}");
        }
    }

    #[test]
    fn what_is_restored_is_as_the_source_says() {
        let source = include_str!("../../../csrc/restore_pages.cu");
        for text in [
            format!("constexpr int kMaxDim = {};", RESTORED.dim),
            format!("constexpr int kPitch = kMaxDim + {};", RESTORED.pitch - RESTORED.dim),
            format!("constexpr int kTokens = {};", RESTORED.tokens),
            format!("constexpr int kThreads = {THREADS};"),
        ] {
            assert!(source.contains(&text), "{text}");
        }
        assert_eq!(RESTORED.token_bytes, RESTORED.dim / 8 + 2 * RESTORED.dim);
        let halves = (2 * 128 + 64) * 136;
        assert_eq!(RESTORED.shared_bytes(), 2 * halves + 64 * 272 + 4 * (64 + 128));
    }
}
