//! Params of the kernels as `csrc/api.h` lays them out.

use kvweave_core::ops::MOST_TABLES;

use crate::tensor_map::TensorMap;

/// Mirror of `CopyRerotateParams`. Strides count elements.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CopyRerotateParams {
    /// Paged KV that is written.
    pub(crate) cache: u64,
    /// Paged KV that is read.
    pub(crate) source: u64,
    /// i32 [copy_count, 6].
    pub(crate) copies: u64,
    /// f32 [layers, pairs].
    pub(crate) inv_freq: u64,
    /// i32 [pages], or 0.
    pub(crate) page_layers: u64,
    /// Block numbers below this lie within the cache.
    pub(crate) blocks: i64,
    pub(crate) block_stride: i64,
    pub(crate) part_stride: i64,
    pub(crate) head_stride: i64,
    pub(crate) token_stride: i64,
    pub(crate) value_offset: i64,
    /// The same of the source.
    pub(crate) source_blocks: i64,
    pub(crate) source_block_stride: i64,
    pub(crate) source_part_stride: i64,
    pub(crate) source_head_stride: i64,
    pub(crate) source_token_stride: i64,
    pub(crate) source_value_offset: i64,
    pub(crate) copy_count: u32,
    /// Of `inv_freq`.
    pub(crate) layers: u32,
    /// Parts of a block that lie `part_stride` apart: layers, or pages with layers of their own.
    pub(crate) parts: u32,
    pub(crate) kv_heads: u32,
    pub(crate) page_tokens: u32,
    pub(crate) source_page_tokens: u32,
    pub(crate) head_dim: u32,
    pub(crate) pairs: u32,
    pub(crate) heads_per_block: u32,
    pub(crate) head_chunks: u32,
}

/// Mirror of `PagedKv`: the keys and values of one layer, as attention reads them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PagedKvParams {
    pub(crate) cache: u64,
    /// i32 [N, 5].
    pub(crate) entries: u64,
    /// i32 [B·tables + 1].
    pub(crate) entry_offsets: u64,
    /// i32 [G, 4], or 0.
    pub(crate) heads: u64,
    /// f32 [pairs].
    pub(crate) inv_freq: u64,
    /// Pages within the cache begin at this element at the latest; −1 for a cache of no page.
    pub(crate) last_page: i64,
    pub(crate) block_stride: i64,
    pub(crate) head_stride: i64,
    pub(crate) token_stride: i64,
    pub(crate) value_offset: i64,
    pub(crate) tables: u32,
    pub(crate) kv_heads: u32,
    pub(crate) page_tokens: u32,
    pub(crate) head_dim: u32,
    pub(crate) pairs: u32,
    pub(crate) interleaved: u32,
    /// Without heads: the page of KV head 0.
    pub(crate) first_rank: u32,
    /// Without heads: keys a row sees at most, 0 for all.
    pub(crate) window: u32,
}

/// Mirror of `AttendParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AttendParams {
    pub(crate) kv: PagedKvParams,
    pub(crate) q: u64,
    /// i32 [R].
    pub(crate) positions: u64,
    /// i32 [B + 1], or 0: row b is request b.
    pub(crate) row_offsets: u64,
    pub(crate) out: u64,
    /// f32 [R, H].
    pub(crate) lse: u64,
    /// Workspace of split keys, or 0.
    pub(crate) partial: u64,
    /// Workspace of split keys, or 0.
    pub(crate) counters: u64,
    pub(crate) q_row_stride: i64,
    pub(crate) q_head_stride: i64,
    pub(crate) scale: f32,
    /// 0 for none.
    pub(crate) softcap: f32,
    /// Of an fp8 cache, 1 otherwise; that of its keys is part of `scale`.
    pub(crate) value_scale: f32,
    pub(crate) rows: u32,
    pub(crate) requests: u32,
    pub(crate) query_heads: u32,
    pub(crate) splits: u32,
    /// Of decode, as `operands::factor_of` makes them: runs of a page.
    pub(crate) run_factor: u32,
    /// KV heads.
    pub(crate) head_factor: u32,
    /// Items of a KV head.
    pub(crate) chunk_factor: u32,
    /// Thread blocks.
    pub(crate) block_factor: u32,
}

/// Mirror of `TiledAttendParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct TiledAttendParams {
    pub(crate) pages: TensorMap,
    pub(crate) attend: AttendParams,
    /// `block_stride` in units of the map's last axis.
    pub(crate) block_units: u32,
    /// `head_stride`.
    pub(crate) head_units: u32,
    /// `value_offset`.
    pub(crate) value_units: u32,
}

/// Mirror of `ScoreParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ScoreParams {
    pub(crate) kv: PagedKvParams,
    pub(crate) q: u64,
    /// i32 [rows].
    pub(crate) positions: u64,
    /// f32 [keys].
    pub(crate) mass: u64,
    /// f32 [rows, query_heads], or 0.
    pub(crate) edge: u64,
    /// Workspace: i64 [tables, padded_keys].
    pub(crate) key_at: u64,
    /// Workspace: i32 [tables, padded_keys].
    pub(crate) delta_at: u64,
    /// Workspace: f32 [splits, 3, kv_heads, V], V = rows · query_heads / kv_heads.
    pub(crate) partial: u64,
    /// Workspace: f32 [kv_heads, V].
    pub(crate) lse: u64,
    /// Workspace: f32 [mass_parts, kv_heads, padded_keys].
    pub(crate) head_mass: u64,
    pub(crate) q_row_stride: i64,
    pub(crate) q_head_stride: i64,
    pub(crate) scale: f32,
    /// 0 for none.
    pub(crate) softcap: f32,
    pub(crate) rows: u32,
    pub(crate) query_heads: u32,
    pub(crate) keys: u32,
    pub(crate) padded_keys: u32,
    pub(crate) splits: u32,
    pub(crate) rows_held: u32,
    pub(crate) keys_held: u32,
    pub(crate) edge_window: u32,
    pub(crate) edge_sink: u32,
    /// 2^32 / group rounded up, 0 for a group of one.
    pub(crate) group_factor: u32,
    pub(crate) mass_parts: u32,
}

/// Mirror of `WritePagesParams`. Sizes and strides count words of the kernel's width.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct WritePagesParams {
    /// Paged KV, written in place.
    pub(crate) cache: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    /// i32 [rows, 2], or [tables, rows, 2] with heads.
    pub(crate) slots: u64,
    /// i32 [G, 4], or 0.
    pub(crate) heads: u64,
    /// Pages within the cache begin at this word at the latest; −1 for a cache of no page.
    pub(crate) last_page: i64,
    pub(crate) block_stride: i64,
    /// Without heads: from a block to its first page of this layer.
    pub(crate) layer_offset: i64,
    pub(crate) head_stride: i64,
    pub(crate) token_stride: i64,
    pub(crate) value_offset: i64,
    pub(crate) k_row_stride: i64,
    pub(crate) k_head_stride: i64,
    pub(crate) v_row_stride: i64,
    pub(crate) v_head_stride: i64,
    pub(crate) rows: u32,
    pub(crate) kv_heads: u32,
    pub(crate) page_tokens: u32,
    /// Words of a vector.
    pub(crate) columns: u32,
    /// Of an fp8 cache.
    pub(crate) key_scale: f32,
    pub(crate) value_scale: f32,
}

/// Mirror of `PageBoundsParams`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct PageBoundsParams {
    pub(crate) cache: u64,
    /// i32 [N, 3].
    pub(crate) held: u64,
    /// i32 [N], or 0: the numbers of blocks.
    pub(crate) rows: u64,
    /// [pages, vectors, head_dim].
    pub(crate) bounds: u64,
    /// u8 [pages], or 0.
    pub(crate) scales: u64,
    /// Block numbers below this lie within the cache.
    pub(crate) blocks: i64,
    /// Rows that stand for blocks lie within bounds below this.
    pub(crate) described: i64,
    pub(crate) block_stride: i64,
    pub(crate) layer_offset: i64,
    pub(crate) head_stride: i64,
    pub(crate) token_stride: i64,
    pub(crate) kv_heads: u32,
    pub(crate) page_tokens: u32,
    pub(crate) head_dim: u32,
    /// Of this layer, counted from the block's first.
    pub(crate) first_page: u32,
    /// What stored keys are multiplied by.
    pub(crate) key_scale: f32,
}

/// Mirror of `MergeStatesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct MergeStatesParams {
    pub(crate) outs: u64,
    /// f32 [splits, states].
    pub(crate) lses: u64,
    pub(crate) out: u64,
    /// f32 [states].
    pub(crate) lse: u64,
    pub(crate) states: i64,
    pub(crate) splits: u32,
    pub(crate) head_dim: u32,
    pub(crate) states_per_block: u32,
}

/// Mirror of `RotatedVectors`: [rows, heads, head_dim] by strides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RotatedVectorsParams {
    /// Where they are written.
    pub(crate) target: u64,
    /// Where they are read, the target in place.
    pub(crate) source: u64,
    pub(crate) row_stride: i64,
    pub(crate) head_stride: i64,
    pub(crate) source_row_stride: i64,
    pub(crate) source_head_stride: i64,
    pub(crate) heads: u32,
    /// Of a row: threads' shares of its heads.
    pub(crate) slots: u32,
}

/// Mirror of `RotateRowsParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RotateRowsParams {
    pub(crate) q: RotatedVectorsParams,
    /// Without heads where there are none.
    pub(crate) k: RotatedVectorsParams,
    /// [rows, pairs] by rows.
    pub(crate) cos: u64,
    pub(crate) sin: u64,
    pub(crate) cos_row_stride: i64,
    pub(crate) sin_row_stride: i64,
    pub(crate) rows: u32,
    pub(crate) pairs: u32,
    /// Threads of a slot: packs of pairs, then packs that are copied.
    pub(crate) columns: u32,
}

/// Mirror of `StepTablesParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct StepTablesParams {
    /// i32 [requests, columns], rows `block_stride` apart.
    pub(crate) blocks: u64,
    /// i32 [requests].
    pub(crate) lengths: u64,
    /// i32 [requests + 1].
    pub(crate) query_start: u64,
    /// i64 [rows].
    pub(crate) slot_mapping: u64,
    /// i32 [tables, pages], or 0.
    pub(crate) places: u64,
    /// i32 [rows].
    pub(crate) positions: u64,
    /// i32 [tables, rows, 2].
    pub(crate) slots: u64,
    /// i32 [N, 5].
    pub(crate) entries: u64,
    /// i32 [requests · tables + 1].
    pub(crate) offsets: u64,
    pub(crate) block_stride: i64,
    pub(crate) requests: u32,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    pub(crate) page_tokens: u32,
    pub(crate) block_pages: u32,
    /// Of `places`.
    pub(crate) pages: u32,
    pub(crate) tables: u32,
    /// Thread blocks of a request.
    pub(crate) chunks: u32,
    pub(crate) spans: [SpanParams; MOST_TABLES],
}

/// Mirror of `GatherEntriesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct GatherEntriesParams {
    /// i32 [requests, kv_heads, most].
    pub(crate) pages: u64,
    /// i32 [requests, kv_heads].
    pub(crate) selected: u64,
    /// i32 [N, 5].
    pub(crate) entries: u64,
    /// i32 [requests · tables + 1].
    pub(crate) entry_offsets: u64,
    /// i32 [G, 4], or 0.
    pub(crate) heads: u64,
    /// i32 [requests · kv_heads · most, 5].
    pub(crate) gathered: u64,
    /// i32 [2 · requests · kv_heads + 1].
    pub(crate) offsets: u64,
    /// i32 [kept_rows, kv_heads, most], or 0.
    pub(crate) kept: u64,
    /// i32 [requests].
    pub(crate) kept_of: u64,
    /// u8 [requests].
    pub(crate) again: u64,
    pub(crate) kv_heads: u32,
    pub(crate) tables: u32,
    pub(crate) most: u32,
    pub(crate) kept_rows: u32,
}

/// Mirror of `BasesParams`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct BasesParams {
    /// f32 [count, pages, 2, rows, head_dim]; 0: none.
    pub(crate) bases: u64,
    /// i32 [packed pages].
    pub(crate) basis_of: u64,
    pub(crate) count: u32,
    /// Of a block.
    pub(crate) pages: u32,
    /// Of keys, and of values.
    pub(crate) rows: u32,
    /// Of the codes of a token's key and value, of planes.
    pub(crate) token_bytes: u32,
}

/// Mirror of `TopRParams`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct TopRParams {
    /// Numbers of a vector.
    pub(crate) kept: u32,
    pub(crate) group: u32,
    pub(crate) channels: u32,
    /// Of a number.
    pub(crate) bits: u32,
}

/// Mirror of `PackPagesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct PackPagesParams {
    /// [cache_pages, 2, source_tokens, head_dim].
    pub(crate) cache: u64,
    /// [packed_pages, page_bytes].
    pub(crate) packed: u64,
    /// i32 [rows, width].
    pub(crate) packs: u64,
    pub(crate) cache_pages: i64,
    pub(crate) packed_pages: i64,
    pub(crate) width: u32,
    /// Of a block, on either side.
    pub(crate) pages: u32,
    pub(crate) source_tokens: u32,
    /// Of a packed page.
    pub(crate) page_tokens: u32,
    pub(crate) head_dim: u32,
    pub(crate) page_bytes: u32,
    /// Of `packs`.
    pub(crate) rows: u32,
    pub(crate) bases: BasesParams,
    pub(crate) top_r: TopRParams,
}

/// Mirror of `AttendPackedParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AttendPackedParams {
    /// The cache and its strides count bytes.
    pub(crate) attend: AttendParams,
    pub(crate) page_bytes: u32,
    /// Of a page's place in shared memory.
    pub(crate) stage_bytes: u32,
    /// Warps that take pages.
    pub(crate) workers: u32,
    pub(crate) bases: BasesParams,
    pub(crate) top_r: TopRParams,
}

/// Mirror of `SpanParams`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct SpanParams {
    /// Latest keys that a row sees, 0 for all.
    pub(crate) window: u32,
    /// Pages of the sink, 0 without a window.
    pub(crate) sinks: u32,
    /// Most entries of a request.
    pub(crate) columns: u32,
}

const _: () = assert!(size_of::<CopyRerotateParams>() == 176);
const _: () = assert!(std::mem::offset_of!(CopyRerotateParams, copy_count) == 136);
const _: () = assert!(size_of::<PagedKvParams>() == 112);
const _: () = assert!(size_of::<AttendParams>() == 232);
const _: () = assert!(size_of::<TiledAttendParams>() == 384);
const _: () = assert!(size_of::<ScoreParams>() == 256);
const _: () = assert!(size_of::<WritePagesParams>() == 144);
const _: () = assert!(size_of::<PageBoundsParams>() == 112);
const _: () = assert!(size_of::<MergeStatesParams>() == 56);
const _: () = assert!(size_of::<RotatedVectorsParams>() == 56);
const _: () = assert!(size_of::<RotateRowsParams>() == 160);
const _: () = assert!(size_of::<GatherEntriesParams>() == 96);
const _: () = assert!(size_of::<PackPagesParams>() == 120);
const _: () = assert!(size_of::<AttendPackedParams>() == 296);
const _: () = assert!(size_of::<StepTablesParams>() == 880);
