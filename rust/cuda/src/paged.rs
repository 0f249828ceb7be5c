//! The keys and values of one layer, as the ops that read pages are given them.

use kvweave_core::KvDtype;
use kvweave_core::ops::{KvScales, PageGeometry, Pairing};

use crate::error::CudaError;
use crate::ffi::DeviceBuffer;
use crate::operands::{DeviceTensor, last_page, long, narrow};
use crate::params::PagedKvParams;

/// Largest head dim that any kernel takes.
const MAX_HEAD_DIM: usize = 256;

/// Keys and values of one layer in pages on the device: `kvweave_core::ops::KvView`, whose checks
/// are the caller's where the tables are on the host. Kernels read an entry that points outside
/// the cache as one without tokens; offsets are taken as they are.
#[derive(Clone, Copy, Debug)]
pub struct DeviceKv<'a> {
    /// The whole paged tensor.
    pub cache: DeviceTensor,
    /// Its elements.
    pub dtype: KvDtype,
    /// What they are multiplied by.
    pub scales: KvScales,
    /// Its strides; layers lie a whole number of pages apart.
    pub geometry: PageGeometry,
    /// The layer read.
    pub layer: usize,
    /// i32 [N, 5], contiguous.
    pub entries: DeviceTensor,
    /// i32 [B·R + 1].
    pub entry_offsets: DeviceTensor,
    /// What each KV head reads, where they differ.
    pub reach: Option<DeviceReach<'a>>,
    /// Keys a row sees at most, where there is no reach.
    pub window: Option<u32>,
    /// f32 [layers, pairs].
    pub inv_freq: &'a DeviceBuffer,
    /// rotary_dim / 2.
    pub pairs: usize,
    /// How elements pair up.
    pub pairing: Pairing,
}

/// `kvweave_core::ops::Reach` with its rows on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceReach<'a> {
    /// R: entry tables of a request.
    pub tables: usize,
    /// i32 [G, 4].
    pub heads: &'a DeviceBuffer,
}

impl DeviceKv<'_> {
    /// R: entry tables of a request.
    pub(crate) fn tables(&self) -> usize {
        self.reach.map_or(1, |reach| reach.tables)
    }

    /// The kernels' view, after a look at what they can take.
    pub(crate) fn params(&self, requests: usize) -> Result<PagedKvParams, CudaError> {
        let geometry = &self.geometry;
        if geometry.head_dim > MAX_HEAD_DIM || !geometry.head_dim.is_multiple_of(8) {
            let expected = format!("a multiple of 8 up to {MAX_HEAD_DIM}");
            return Err(CudaError::unsupported("head_dim", expected, geometry.head_dim));
        }
        if 2 * self.pairs > geometry.head_dim {
            return Err(CudaError::invalid("rotary_dim", geometry.head_dim, 2 * self.pairs));
        }
        if self.layer >= geometry.layers {
            let expected = format!("a layer below {}", geometry.layers);
            return Err(CudaError::invalid("layer", expected, self.layer));
        }
        let spans = requests.saturating_mul(self.tables());
        self.entry_offsets.expect("entry_offsets", spans.saturating_add(1))?;
        let first_rank = if self.reach.is_some() { 0 } else { self.first_rank()? };
        let row = self.layer * self.pairs * size_of::<f32>();
        Ok(PagedKvParams {
            cache: self.cache.address,
            entries: self.entries.address,
            entry_offsets: self.entry_offsets.address,
            heads: self.reach.map_or(0, |reach| reach.heads.address()),
            inv_freq: self.inv_freq.address() + row as u64,
            last_page: last_page(geometry, self.cache.len),
            block_stride: long("block_stride", geometry.block_stride)?,
            head_stride: long("head_stride", geometry.head_stride)?,
            token_stride: long("token_stride", geometry.token_stride)?,
            value_offset: long("value_offset", geometry.value_offset)?,
            tables: narrow("tables", self.tables())?,
            kv_heads: narrow("kv_heads", geometry.kv_heads)?,
            page_tokens: narrow("page_tokens", geometry.page_tokens)?,
            head_dim: narrow("head_dim", geometry.head_dim)?,
            pairs: narrow("rotary_dim", self.pairs)?,
            interleaved: u32::from(self.pairing == Pairing::Interleaved),
            first_rank: narrow("layer", first_rank)?,
            // A window that holds every position; kernels compute with signed numbers.
            window: self.window.unwrap_or(0).min(i32::MAX.cast_unsigned()),
        })
    }

    /// The page of this layer's first KV head, counted from the block's start.
    fn first_rank(&self) -> Result<usize, CudaError> {
        let PageGeometry { layer_stride, head_stride, .. } = self.geometry;
        if self.layer == 0 {
            return Ok(0);
        }
        if head_stride == 0 || !layer_stride.is_multiple_of(head_stride) {
            let expected = format!("a multiple of the head stride {head_stride}");
            return Err(CudaError::unsupported("layer stride", expected, layer_stride));
        }
        Ok(self.layer * (layer_stride / head_stride))
    }
}
