//! Params of the kernels by which decode steps choose pages, as `csrc/api.h` lays them out.

/// Mirror of `ScorePagesParams`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct ScorePagesParams {
    pub(crate) q: u64,
    /// [pages, vectors, head_dim].
    pub(crate) bounds: u64,
    /// u8 [pages], or 0.
    pub(crate) scales: u64,
    /// i32 [N, 5].
    pub(crate) entries: u64,
    /// i32 [requests · tables + 1].
    pub(crate) entry_offsets: u64,
    /// i32 [G, 4], or 0.
    pub(crate) heads: u64,
    /// f32 [pairs].
    pub(crate) inv_freq: u64,
    /// f32 [requests, kv_heads, width].
    pub(crate) scores: u64,
    /// i32 [requests, kv_heads].
    pub(crate) counts: u64,
    pub(crate) q_row_stride: i64,
    pub(crate) q_head_stride: i64,
    /// That have bounds.
    pub(crate) pages: i64,
    pub(crate) tables: u32,
    pub(crate) kv_heads: u32,
    pub(crate) group: u32,
    pub(crate) head_dim: u32,
    pub(crate) pairs: u32,
    pub(crate) interleaved: u32,
    /// Without heads: the page of KV head 0.
    pub(crate) first_rank: u32,
    pub(crate) width: u32,
    /// Rows of scores, whose windows of 64 entries all thread blocks share evenly; 0 where each
    /// row has `chunks` of them.
    pub(crate) rows: u32,
    /// Thread blocks of a row of scores, which share its windows.
    pub(crate) chunks: u32,
    /// Whether scores of the query heads of a KV head are summed; else the highest counts.
    pub(crate) summed: u32,
    pub(crate) scale: f32,
    /// 0 for none.
    pub(crate) softcap: f32,
}

/// Mirror of `EstimatePagesParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct EstimatePagesParams {
    pub(crate) q: u64,
    /// [requests, query_heads, head_dim].
    pub(crate) attended: u64,
    /// f32 [requests, query_heads].
    pub(crate) attended_lse: u64,
    /// [pages, 2, head_dim].
    pub(crate) means: u64,
    /// i32 [N, 5].
    pub(crate) entries: u64,
    /// i32 [requests · tables + 1].
    pub(crate) entry_offsets: u64,
    /// i32 [G, 4], or 0.
    pub(crate) heads: u64,
    /// i32 [M, 5].
    pub(crate) read: u64,
    /// i32 [requests · read_tables + 1].
    pub(crate) read_offsets: u64,
    /// i32 [G, 4], or 0: table 0.
    pub(crate) read_heads: u64,
    /// f32 [pairs].
    pub(crate) inv_freq: u64,
    /// [requests, query_heads, head_dim].
    pub(crate) out: u64,
    /// f32 [requests, query_heads].
    pub(crate) lse: u64,
    /// Workspace of splits.
    pub(crate) partial: u64,
    /// Workspace: a number of each part of a row's query heads.
    pub(crate) counters: u64,
    pub(crate) q_row_stride: i64,
    pub(crate) q_head_stride: i64,
    /// That have means.
    pub(crate) pages: i64,
    pub(crate) tables: u32,
    pub(crate) read_tables: u32,
    pub(crate) kv_heads: u32,
    pub(crate) group: u32,
    /// Parts of a group, each a thread block's.
    pub(crate) chunks: u32,
    /// Thread blocks of a row.
    pub(crate) blocks: u32,
    pub(crate) head_dim: u32,
    pub(crate) pairs: u32,
    pub(crate) interleaved: u32,
    /// Without heads: the page of KV head 0.
    pub(crate) first_rank: u32,
    pub(crate) scale: f32,
    /// 0 for none.
    pub(crate) softcap: f32,
}

/// Mirror of `SelectPagesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct SelectPagesParams {
    /// f32 [rows, width].
    pub(crate) scores: u64,
    /// i32 [rows].
    pub(crate) counts: u64,
    /// i32 [rows].
    pub(crate) budgets: u64,
    /// i32 [rows, most].
    pub(crate) pages: u64,
    /// i32 [rows].
    pub(crate) selected: u64,
    pub(crate) width: u32,
    pub(crate) most: u32,
    pub(crate) sink: u32,
    pub(crate) recent: u32,
}

const _: () = assert!(size_of::<ScorePagesParams>() == 152);
const _: () = assert!(size_of::<EstimatePagesParams>() == 192);
const _: () = assert!(size_of::<SelectPagesParams>() == 56);
