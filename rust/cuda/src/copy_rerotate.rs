//! Launch of `copy_rerotate.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::{PageGeometry, Pairing};

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{DeviceBuffer, Grid};
use crate::operands::{DeviceTensor, blocks_of, blocks_within, bytes_of, long, name_of, narrow};
use crate::params::CopyRerotateParams;

/// Threads of the largest block, as the kernel's launch bounds say.
const MAX_THREADS: usize = 256;
/// Threads that the largest devices run at once.
const THREADS_AT_ONCE: usize = 1 << 17;
/// Threads below which a block of one head is too small to be worth its start.
const WORTH_A_BLOCK: usize = 128;

/// Tokens of all pages of blocks copied to others, keys rotated: see
/// `kvweave_core::ops::CopyRerotate`, whose checks are the caller's where the table is on the host.
/// The kernel itself skips rows that point outside the cache or the source.
#[derive(Clone, Copy, Debug)]
pub struct CopyRerotateLaunch<'a> {
    /// The whole paged tensor.
    pub cache: DeviceTensor,
    /// Its elements.
    pub dtype: KvDtype,
    /// Its strides.
    pub geometry: PageGeometry,
    /// Another paged tensor of the same elements that blocks are read from, and its strides; none:
    /// the cache itself.
    pub source: Option<(DeviceTensor, PageGeometry)>,
    /// i32 [copy_count, 6], contiguous.
    pub copies: DeviceTensor,
    /// Rows of `copies`.
    pub copy_count: usize,
    /// f32 [layers, pairs].
    pub inv_freq: &'a DeviceBuffer,
    /// rotary_dim / 2.
    pub pairs: usize,
    /// How elements pair up.
    pub pairing: Pairing,
    /// Blocks of a head group: i32 [pages], the layer of each page, and how many there are.
    pub page_layers: Option<(DeviceTensor, usize)>,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CopyRerotateLaunch<'_> {
    /// What is read, and its strides.
    fn read(&self) -> (DeviceTensor, PageGeometry) {
        self.source.unwrap_or((self.cache, self.geometry))
    }
}

impl CudaBackend {
    /// Puts the copy on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, `stream` is a stream of this device, a source is apart from the cache and
    /// has its layers, heads and head dim, and no block of the cache is both read and written in
    /// one call.
    ///
    /// # Errors
    /// `InvalidArgument` for a geometry the kernel cannot take, `Driver` when the launch fails.
    pub unsafe fn copy_rerotate(&self, call: &CopyRerotateLaunch<'_>) -> Result<(), CudaError> {
        if call.copy_count == 0 {
            return Ok(());
        }
        let shape = Shape::of(call)?;
        let params = params_of(call, &shape)?;
        let pairing = match call.pairing {
            Pairing::Half => "half",
            Pairing::Interleaved => "interleaved",
        };
        let width = if shape.wide { "wide" } else { "narrow" };
        let name = format!("copy_rerotate_{}_{pairing}_{width}", name_of(call.dtype));
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("copy_rerotate", &name), shape.grid, call.stream, &params) }
    }
}

/// A block's layers and their heads, or its pages one by one.
#[derive(Clone, Copy)]
struct Parts {
    count: usize,
    heads: usize,
    stride: usize,
}

impl Parts {
    fn of(call: &CopyRerotateLaunch<'_>, geometry: PageGeometry) -> Self {
        let PageGeometry { layers, kv_heads, layer_stride, head_stride, .. } = geometry;
        match call.page_layers {
            Some((_, count)) => Self { count, heads: 1, stride: head_stride },
            None => Self { count: layers, heads: kv_heads.max(1), stride: layer_stride },
        }
    }

    /// Thread blocks that share the heads of a part. Where blocks with several heads can all run
    /// at once they do, as many as can; else each has one head, and they end soon after each other,
    /// but for small heads, which share one block.
    fn chunks(self, copies: usize, threads: usize) -> usize {
        let (whole, at_once) = ((copies * self.count).max(1), THREADS_AT_ONCE / threads);
        if whole <= at_once {
            (at_once / whole).min(self.heads)
        } else if threads < WORTH_A_BLOCK {
            1
        } else {
            self.heads
        }
    }
}

/// How the work is cut.
struct Shape {
    wide: bool,
    parts: Parts,
    heads_per_block: usize,
    grid: Grid,
}

impl Shape {
    fn of(call: &CopyRerotateLaunch<'_>) -> Result<Self, CudaError> {
        let geometry = &call.geometry;
        let vector = 16 / bytes_of(call.dtype);
        let (source, read) = call.read();
        let strides = |of: &PageGeometry| {
            let PageGeometry { block_stride, layer_stride, head_stride, token_stride, .. } = *of;
            [block_stride, layer_stride, head_stride, token_stride, of.value_offset, of.head_dim]
        };
        let wide = [(call.cache, geometry), (source, &read)].iter().all(|(tensor, of)| {
            tensor.address.is_multiple_of(16)
                && strides(of).iter().all(|stride| stride.is_multiple_of(vector))
        }) && call.pairs.is_multiple_of(vector);
        let vector = if wide { vector } else { 1 };
        let columns = geometry.head_dim / vector;
        if columns > MAX_THREADS {
            let expected = format!("at most {MAX_THREADS} vectors of {vector} elements");
            return Err(CudaError::invalid("head_dim", expected, geometry.head_dim));
        }
        let key_columns = columns - call.pairs / vector;
        let wanted = (key_columns * geometry.page_tokens).max(columns).next_multiple_of(32);
        let threads = wanted.min(MAX_THREADS);
        let parts = Parts::of(call, *geometry);
        let chunks = parts.chunks(call.copy_count, threads);
        let heads_per_block = parts.heads.div_ceil(chunks);
        let blocks = call.copy_count * parts.count * parts.heads.div_ceil(heads_per_block);
        let wide_bytes = if call.dtype == KvDtype::F32 { 8 } else { 4 };
        let grid = Grid {
            blocks: [blocks_of("copies", blocks)?, 1, 1],
            threads: narrow("threads", threads)?,
            shared_bytes: narrow("rotary_dim", 2 * call.pairs * wide_bytes)?,
        };
        Ok(Self { wide, parts, heads_per_block, grid })
    }
}

fn params_of(
    call: &CopyRerotateLaunch<'_>,
    shape: &Shape,
) -> Result<CopyRerotateParams, CudaError> {
    let geometry = &call.geometry;
    if 2 * call.pairs > geometry.head_dim {
        return Err(CudaError::invalid("rotary_dim", geometry.head_dim, 2 * call.pairs));
    }
    call.copies.expect("copies", 6 * call.copy_count)?;
    if let Some((layers, pages)) = call.page_layers {
        layers.expect("layers", pages)?;
    }
    let (source, read) = call.read();
    let (parts, source_parts) = (shape.parts, Parts::of(call, read));
    let within = |geometry: &PageGeometry, parts: Parts, len| {
        let last = parts.count.saturating_sub(1) * parts.stride;
        blocks_within(geometry, last + (parts.heads - 1) * geometry.head_stride, len)
    };
    Ok(CopyRerotateParams {
        cache: call.cache.address,
        source: source.address,
        copies: call.copies.address,
        inv_freq: call.inv_freq.address(),
        page_layers: call.page_layers.map_or(0, |(layers, _)| layers.address),
        blocks: within(geometry, parts, call.cache.len),
        block_stride: long("block_stride", geometry.block_stride)?,
        part_stride: long("layer_stride", parts.stride)?,
        head_stride: long("head_stride", geometry.head_stride)?,
        token_stride: long("token_stride", geometry.token_stride)?,
        value_offset: long("value_offset", geometry.value_offset)?,
        source_blocks: within(&read, source_parts, source.len),
        source_block_stride: long("block_stride", read.block_stride)?,
        source_part_stride: long("layer_stride", source_parts.stride)?,
        source_head_stride: long("head_stride", read.head_stride)?,
        source_token_stride: long("token_stride", read.token_stride)?,
        source_value_offset: long("value_offset", read.value_offset)?,
        copy_count: narrow("copies", call.copy_count)?,
        layers: narrow("layers", geometry.layers)?,
        parts: narrow("pages", parts.count)?,
        kv_heads: narrow("kv_heads", parts.heads)?,
        page_tokens: narrow("page_tokens", geometry.page_tokens)?,
        source_page_tokens: narrow("page_tokens", read.page_tokens)?,
        head_dim: narrow("head_dim", geometry.head_dim)?,
        pairs: narrow("rotary_dim", call.pairs)?,
        heads_per_block: narrow("kv_heads", shape.heads_per_block)?,
        head_chunks: narrow("kv_heads", parts.heads.div_ceil(shape.heads_per_block))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_share_blocks_only_where_all_run_at_once() {
        let parts = Parts { count: 32, heads: 8, stride: 0 };
        let chunks = |copies| parts.chunks(copies, 128);
        assert_eq!([0, 1, 4, 8, 16, 32, 33, 512].map(chunks), [8, 8, 8, 4, 2, 1, 8, 8]);
        let page = Parts { count: 500, heads: 1, stride: 0 };
        assert_eq!([1, 2, 3].map(|copies| page.chunks(copies, 128)), [1, 1, 1]);
    }

    #[test]
    fn small_heads_share_a_block_where_not_all_run_at_once() {
        let parts = Parts { count: 24, heads: 2, stride: 0 };
        assert_eq!([1, 40, 80, 90, 4096].map(|copies| parts.chunks(copies, 64)), [2, 2, 1, 1, 1]);
    }
}
