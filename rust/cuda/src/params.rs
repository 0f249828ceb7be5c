//! Params of the kernels as `csrc/api.h` lays them out.

/// Mirror of `CopyRerotateParams`. Strides count elements.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CopyRerotateParams {
    /// Paged KV, written in place.
    pub(crate) cache: u64,
    /// i32 [copy_count, 6].
    pub(crate) copies: u64,
    /// f32 [layers, pairs].
    pub(crate) inv_freq: u64,
    /// Block numbers below this lie within the cache.
    pub(crate) blocks: i64,
    pub(crate) block_stride: i64,
    pub(crate) layer_stride: i64,
    pub(crate) head_stride: i64,
    pub(crate) token_stride: i64,
    pub(crate) value_offset: i64,
    pub(crate) copy_count: u32,
    pub(crate) layers: u32,
    pub(crate) kv_heads: u32,
    pub(crate) page_tokens: u32,
    pub(crate) head_dim: u32,
    pub(crate) pairs: u32,
    pub(crate) heads_per_block: u32,
    pub(crate) head_chunks: u32,
}

const _: () = assert!(size_of::<CopyRerotateParams>() == 104);
const _: () = assert!(std::mem::offset_of!(CopyRerotateParams, copy_count) == 72);
