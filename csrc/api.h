// Params of the kernels, mirrored field by field in rust/cuda/src/params.rs.
//
// Pointers are device addresses; sizes and strides count elements. One struct per op, passed by
// value as the kernel's only argument.
#pragma once

#include <cstddef>
#include <cstdint>

struct CopyRerotateParams {
  void* cache;            // paged KV that is written
  const void* source;     // paged KV that is read: the cache's, or another tensor's
  const int32_t* copies;  // [copy_count, 6]: src_block, src_slot, dst_block, dst_slot, count, delta
  const float* inv_freq;  // [layers, pairs]
  const int32_t* page_layers;  // [parts]: the layer of each page; null: a part is a layer
  int64_t blocks;              // block numbers below this lie within the cache
  int64_t block_stride;        // from block number b to b + 1
  int64_t part_stride;         // from one layer to the next, or from one page
  int64_t head_stride;
  int64_t token_stride;
  int64_t value_offset;         // from a token's key to its value
  int64_t source_blocks;        // the same of the source
  int64_t source_block_stride;
  int64_t source_part_stride;
  int64_t source_head_stride;
  int64_t source_token_stride;
  int64_t source_value_offset;
  uint32_t copy_count;
  uint32_t layers;
  uint32_t parts;     // of a block: its layers, or its pages one by one
  uint32_t kv_heads;  // of a part
  uint32_t page_tokens;
  uint32_t source_page_tokens;
  uint32_t head_dim;
  uint32_t pairs;            // rotary_dim / 2
  uint32_t heads_per_block;  // KV heads that one thread block copies
  uint32_t head_chunks;      // ceil(kv_heads / heads_per_block)
};

// The keys and values of one layer, as attention reads them.
struct PagedKv {
  const void* cache;
  const int32_t* entries;        // [N, 5]: block, begin, end, position, delta
  const int32_t* entry_offsets;  // [B·tables + 1]
  const int32_t* heads;          // [G, 4]: table, rank, window, sink; null: see first_rank
  const float* inv_freq;         // [pairs], this layer's
  int64_t last_page;             // pages within the cache begin at this element at the latest
  int64_t block_stride;          // from block number b to b + 1
  int64_t head_stride;           // from rank r to r + 1
  int64_t token_stride;
  int64_t value_offset;  // from a token's key to its value
  uint32_t tables;       // entry tables of a request
  uint32_t kv_heads;
  uint32_t page_tokens;
  uint32_t head_dim;
  uint32_t pairs;        // rotary_dim / 2
  uint32_t interleaved;  // pairs are neighbours
  uint32_t first_rank;   // without heads: KV head g has table 0, rank first_rank + g, sink 0
  uint32_t window;       // without heads: keys a row sees at most, 0 for all
};

// attend_prefill and attend_decode.
struct AttendParams {
  PagedKv kv;
  const void* q;               // [R, H, D] by strides
  const int32_t* positions;    // [R]
  const int32_t* row_offsets;  // [B + 1]; null: row b is request b
  void* out;                   // [R, H, D]
  float* lse;                  // [R, H], natural logarithm
  float* partial;              // workspace of split keys
  uint32_t* counters;          // workspace of split keys, zero before and after
  int64_t q_row_stride;
  int64_t q_head_stride;
  float scale;
  float softcap;      // 0 for none
  float value_scale;  // of an fp8 cache, 1 otherwise; that of its keys is part of `scale`
  uint32_t rows;
  uint32_t requests;
  uint32_t query_heads;
  uint32_t splits;
  // Of attend_decode: 2^32 / x rounded up, 0 for 1, to divide by x.
  uint32_t run_factor;    // runs of a page
  uint32_t head_factor;   // KV heads
  uint32_t chunk_factor;  // items of a KV head
  uint32_t block_factor;  // thread blocks
};

// A CUtensorMap, which the driver encodes.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// attend_prefill_sm90.
struct TiledAttendParams {
  // The cache by axes: 64 columns, 8 tokens, blocks of 64 columns, groups of 8 tokens, and where a
  // page's keys or values begin, in units that divide all distances between them. A box is 16
  // tokens, or where pages have 64 tokens or more a page's tokens with 64 columns.
  TensorMap pages;
  AttendParams attend;
  uint32_t block_units;  // block_stride in units
  uint32_t head_units;   // head_stride
  uint32_t value_units;  // value_offset
};

// score_tokens. V = rows · query_heads / kv_heads: query vectors of a KV head, those of a row next
// to each other. Scores and their logarithms are powers of two.
struct ScoreParams {
  PagedKv kv;                // entry_offsets [tables + 1]
  const void* q;             // [rows, query_heads, head_dim] by strides
  const int32_t* positions;  // [rows]
  float* mass;               // [keys]
  float* edge;               // [rows, query_heads], or null
  int64_t* key_at;           // workspace [tables, padded_keys]: element of rank 0's key, or −1
  int32_t* delta_at;         // workspace [tables, padded_keys]
  float* partial;            // workspace [splits, 3, kv_heads, V]: reference, sum, edge sum
  float* lse;                // workspace [kv_heads, V], ∞ for a row that counts for nothing
  float* head_mass;          // workspace [mass_parts, kv_heads, padded_keys]
  int64_t q_row_stride;
  int64_t q_head_stride;
  float scale;
  float softcap;  // 0 for none
  uint32_t rows;
  uint32_t query_heads;
  uint32_t keys;          // positions scored, from 0 on
  uint32_t padded_keys;   // a multiple of 256
  uint32_t splits;        // parts of the keys in the first pass
  uint32_t rows_held;     // query vectors that a thread block holds in the first pass: 64, 128, 256
  uint32_t keys_held;     // keys that it holds in the second: 64, 128, 256
  uint32_t edge_window;   // keys up to this far back are no edge
  uint32_t edge_sink;     // nor are those at positions below this
  uint32_t group_factor;  // 2^32 / (query_heads / kv_heads) rounded up, 0 for a group of one
  uint32_t mass_parts;    // parts of the query vectors that masses are summed over one by one
};

// write_pages. Sizes and strides count words of the kernel's width: as many elements of the cache
// as of rows.
struct WritePagesParams {
  void* cache;           // paged KV, written in place
  const void* k;         // [rows, kv_heads, columns] by strides
  const void* v;         // the same
  const int32_t* slots;  // [tables, rows, 2]: block, slot; without heads one table
  const int32_t* heads;  // [kv_heads, 4]: table, rank, …; null: see layer_offset
  int64_t last_page;     // pages within the cache begin at this word at the latest
  int64_t block_stride;  // from block number b to b + 1
  int64_t layer_offset;  // without heads: from a block to its first page of this layer
  int64_t head_stride;   // from rank r to r + 1
  int64_t token_stride;
  int64_t value_offset;  // from a token's key to its value
  int64_t k_row_stride;
  int64_t k_head_stride;
  int64_t v_row_stride;
  int64_t v_head_stride;
  uint32_t rows;
  uint32_t kv_heads;
  uint32_t page_tokens;
  uint32_t columns;   // words of a vector
  float key_scale;    // of an fp8 cache; others are written as they are
  float value_scale;
};

// page_bounds, the second kernel of write_pages.
struct PageBoundsParams {
  const void* cache;
  const int32_t* held;   // [held_count, 3]: block, begin, end
  const int32_t* rows;   // [held_count]: rows of bounds that stand for blocks; null: their numbers
  void* bounds;          // f32 [pages, 3, head_dim]: min, max, mean; of keys [pages, 2, head_dim];
                         // e4m3 [pages, 2, head_dim], or of means [pages, 1, head_dim]
  uint8_t* scales;       // of e4m3 [pages]: powers of two, see fp8.cuh; else null
  int64_t blocks;        // block numbers below this lie within the cache
  int64_t described;     // rows that stand for blocks lie within bounds below this
  int64_t block_stride;  // from block number b to b + 1
  int64_t layer_offset;  // from a block to its first page of this layer
  int64_t head_stride;
  int64_t token_stride;
  uint32_t kv_heads;
  uint32_t page_tokens;
  uint32_t head_dim;
  uint32_t first_page;  // of this layer, counted from the block's first
  float key_scale;      // what stored keys are multiplied by
};

struct MergeStatesParams {
  const void* outs;   // [splits, states, head_dim]
  const float* lses;  // [splits, states], natural logarithm
  void* out;          // [states, head_dim]
  float* lse;         // [states]
  int64_t states;
  uint32_t splits;
  uint32_t head_dim;
  uint32_t states_per_block;  // states that one thread block merges
};

// Vectors of rotate_rows [rows, heads, head_dim] by strides: where they are written and read, the
// same in place.
struct RotatedVectors {
  void* target;
  const void* source;
  int64_t row_stride;
  int64_t head_stride;
  int64_t source_row_stride;
  int64_t source_head_stride;
  uint32_t heads;
  uint32_t slots;  // of a row: threads' shares of its heads
};

struct RotateRowsParams {
  RotatedVectors q;
  RotatedVectors k;  // without heads where there are none
  const void* cos;   // [rows, pairs] by rows
  const void* sin;
  int64_t cos_row_stride;
  int64_t sin_row_stride;
  uint32_t rows;
  uint32_t pairs;    // rotary_dim / 2
  uint32_t columns;  // threads of a slot: packs of pairs, then packs that are copied
};

struct ScorePagesParams {
  const void* q;                 // [requests, query_heads, head_dim] by strides
  const void* bounds;            // see PageBoundsParams
  const uint8_t* scales;
  const int32_t* entries;        // [N, 5]: block, begin, end, position, delta
  const int32_t* entry_offsets;  // [requests · tables + 1]
  const int32_t* heads;          // [kv_heads, 4]: table, rank, …; null: see first_rank
  const float* inv_freq;         // [pairs], this layer's
  float* scores;                 // [requests, kv_heads, width]
  int32_t* counts;               // [requests, kv_heads]
  int64_t q_row_stride;
  int64_t q_head_stride;
  int64_t pages;         // that have bounds
  uint32_t tables;       // entry tables of a request
  uint32_t kv_heads;
  uint32_t group;        // query heads of a KV head
  uint32_t head_dim;
  uint32_t pairs;        // rotary_dim / 2
  uint32_t interleaved;  // pairs are neighbours
  uint32_t first_rank;   // without heads: KV head g has table 0, rank first_rank + g
  uint32_t width;        // of a row of scores
  uint32_t rows;         // whose windows all thread blocks share; 0: each row has `chunks` of them
  uint32_t chunks;       // thread blocks of a row
  uint32_t summed;       // over the query heads of a KV head; else the highest counts
  float scale;
  float softcap;         // 0 for none
};

// What was attended to and results are [requests, query_heads, head_dim], contiguous, of the dtype
// of q and of means; log-sum-exps are [requests, query_heads].
struct EstimatePagesParams {
  const void* q;  // by strides
  const void* attended;
  const float* attended_lse;
  const void* means;             // [pages, 2, head_dim]: mean key, mean value
  const int32_t* entries;        // [N, 5]: block, begin, end, position, delta
  const int32_t* entry_offsets;  // [requests · tables + 1]
  const int32_t* heads;          // [kv_heads, 4]: table, rank, …; null: see first_rank
  const int32_t* read;           // [M, 5]: entries that were read, by their positions
  const int32_t* read_offsets;   // [requests · read_tables + 1]
  const int32_t* read_heads;     // [kv_heads, 4]: table, …; null: table 0
  const float* inv_freq;         // [pairs], this layer's
  void* out;
  float* lse;
  float* partial;      // workspace [requests · kv_heads · chunks, splits, queries · (dim + 2)]
  uint32_t* counters;  // workspace [requests · kv_heads · chunks], zero before and after
  int64_t q_row_stride;
  int64_t q_head_stride;
  int64_t pages;         // that have means
  uint32_t tables;       // entry tables of a request
  uint32_t read_tables;
  uint32_t kv_heads;
  uint32_t group;        // query heads of a KV head
  uint32_t chunks;       // parts of these, each a thread block's
  uint32_t blocks;       // thread blocks of a row that share its splits
  uint32_t head_dim;
  uint32_t pairs;        // rotary_dim / 2
  uint32_t interleaved;  // pairs are neighbours
  uint32_t first_rank;   // without heads: KV head g has table 0, rank first_rank + g
  float scale;
  float softcap;         // 0 for none
};

struct SelectPagesParams {
  const float* scores;     // [rows, width]
  const int32_t* counts;   // [rows]
  const int32_t* budgets;  // [rows]
  int32_t* pages;          // [rows, most]
  int32_t* selected;       // [rows]
  uint32_t width;
  uint32_t most;
  uint32_t sink;    // pages at a row's start that are always selected
  uint32_t recent;  // and at its end
};

// Rows of recycle_pages that are `ranks` heads of requests with seats, of which there are so many.
struct RecycleSeatsParams {
  const int32_t* of;         // [rows / ranks]: the seat of each request; null: rows have none
  const int32_t* heads;      // [ranks]: whose pages a request's rows have
  const int32_t* away;       // [seats]: a row selects the first pages of its list below this
  const int32_t* blocks;     // [seats, width]: what slots are called
  int32_t* entries;          // [requests, heads_of_pages, most, 5]: of the pages that are listed
  uint32_t seats;
  uint32_t ranks;
  uint32_t heads_of_pages;
  uint32_t ranks_of_seat;    // rows of slots that a seat has
  uint32_t first;            // of them, the one of the first head
  uint32_t by_seat;          // whether pages are [seats, heads_of_pages, most] or requests'
};

// recycle_pages. M = rows · min(most, width).
struct RecyclePagesParams {
  const int32_t* pages;     // [rows, most]
  const int32_t* selected;  // [rows]; unused where rows have seats
  const uint8_t* pinned;    // [rows, width], or null
  int32_t* slots;           // [rows, width]
  int32_t* places;          // [rows, most]
  int32_t* moves;           // [M, 3]
  int32_t* count;           // [1]
  int32_t* refused;         // [rows]
  uint32_t* states;         // workspace [thread blocks + 1], zero before and after
  uint32_t rows;
  uint32_t most;
  uint32_t width;
  uint32_t limit;       // pages of a row are below this
  uint32_t team_bytes;  // shared memory of a row
  RecycleSeatsParams seats;
};

// Pages of an arena by the numbers that rows give them: number n of row r is page
// blocks[r / ranks][n] + r % ranks.
struct RowPagesParams {
  void* data;             // [pages, page_bytes], on the device or where it can reach
  const int32_t* blocks;  // [rows / ranks, width]
  int64_t pages;
  uint32_t rows;
  uint32_t width;
  uint32_t ranks;
};

struct MovePagesParams {
  const int32_t* moves;  // [most, 3]: row, page, slot
  const int32_t* count;  // [1]
  RowPagesParams slots;
  RowPagesParams home;
  uint32_t most;
  uint32_t page_bytes;   // a multiple of 16
  uint32_t page_pieces;  // pieces of kPiece bytes
  uint32_t spills;       // from the slots; else into them
};

struct MoveFp8PagesParams {
  const int32_t* moves;  // [most, 3]: row, page, slot
  const int32_t* count;  // [1]
  RowPagesParams slots;
  RowPagesParams home;   // pages of e4m3
  uint8_t* scales;       // [pages of home, 2]: of keys and of values, powers of two as E8M0
  uint32_t most;
  uint32_t page;         // numbers of a page: keys, then values; a multiple of 32
  uint32_t page_pieces;  // pieces of 4096 numbers
};

struct GatherEntriesParams {
  const int32_t* pages;          // [requests, kv_heads, most]: indices in the head's table
  const int32_t* selected;       // [requests, kv_heads]: of which the first so many count
  const int32_t* entries;        // [N, 5]
  const int32_t* entry_offsets;  // [requests · tables + 1]
  const int32_t* heads;          // [kv_heads, 4]: table, …; null: all have table 0
  int32_t* gathered;             // [requests · kv_heads · most, 5]
  int32_t* offsets;              // [2 · requests · kv_heads + 1]
  int32_t* kept;                 // [kept_rows, kv_heads, most]: what was selected last; or null
  const int32_t* kept_of;        // [requests]: of which row
  const uint8_t* again;          // [requests]: whether that is what counts
  uint32_t kv_heads;
  uint32_t tables;  // entry tables of a request
  uint32_t most;
  uint32_t kept_rows;
};

// The bases that pages are packed in, of kinds that have some: rust/core/src/ops/bases.rs.
struct BasesParams {
  const float* bases;       // [count, pages, 2, rows, head_dim]; null: none
  const int32_t* basis_of;  // [packed pages]: the basis of the block that begins at a page
  uint32_t count;
  uint32_t pages;        // of a block
  uint32_t rows;         // of keys, and of values
  uint32_t token_bytes;  // of the codes of a token's key and value, of planes
};

// What top-r pages are: rust/core/src/ops/top_r.rs.
struct TopRParams {
  uint32_t kept;      // numbers of a vector
  uint32_t group;     // 1, 2 or 4 neighbours, kept together
  uint32_t channels;  // a multiple of group
  uint32_t bits;      // of a number: 16 bf16, 8 fp8, 4 codes
};

// pack_pages and unpack_pages. Packed pages are bytes as packed.cuh, top_r.cuh and planes.cuh
// say.
struct PackPagesParams {
  void* cache;           // [cache_pages, 2, source_tokens, head_dim]
  void* packed;          // [packed_pages, page_bytes]
  const int32_t* packs;  // [rows, width]: packed block, tokens, blocks of the cache
  int64_t cache_pages;
  int64_t packed_pages;
  uint32_t width;
  uint32_t pages;  // of a block, on either side
  uint32_t source_tokens;
  uint32_t page_tokens;  // of a packed page: a multiple of source_tokens, at most 256
  uint32_t head_dim;     // at most 256
  uint32_t page_bytes;
  uint32_t rows;  // of packs
  BasesParams bases;
  TopRParams top_r;
};

// attend_packed: of `attend.kv` the cache and its strides count bytes, and value_offset nothing.
struct AttendPackedParams {
  AttendParams attend;
  uint32_t page_bytes;
  uint32_t stage_bytes;  // of a page's place in shared memory
  uint32_t workers;      // warps that take pages
  BasesParams bases;
  TopRParams top_r;
};

// What the rows of a table see.
struct SpanParams {
  uint32_t window;   // latest keys of a row, 0 for all
  uint32_t sinks;    // pages of the sink, 0 without a window
  uint32_t columns;  // most entries of a request
};

constexpr uint32_t kMostTables = 64;

struct StepTablesParams {
  const int32_t* blocks;        // [requests, columns] page numbers, rows block_stride apart
  const int32_t* lengths;       // [requests]
  const int32_t* query_start;   // [requests + 1]
  const int64_t* slot_mapping;  // [rows]: page · page_tokens + slot, below 0 for nowhere
  const int32_t* places;        // [tables, pages], or null
  int32_t* positions;           // [rows]
  int32_t* slots;               // [tables, rows, 2]
  int32_t* entries;             // [N, 5], room for every request's columns in every table
  int32_t* offsets;             // [requests · tables + 1]
  int64_t block_stride;
  uint32_t requests;
  uint32_t rows;
  uint32_t columns;  // page numbers of a request
  uint32_t page_tokens;
  uint32_t block_pages;  // our pages of one of the engine's
  uint32_t pages;        // of places
  uint32_t tables;
  uint32_t chunks;  // thread blocks of a request
  SpanParams spans[kMostTables];
};

static_assert(sizeof(CopyRerotateParams) == 176, "params.rs says 176 bytes");
static_assert(offsetof(CopyRerotateParams, copy_count) == 136, "params.rs says 136 bytes");
static_assert(sizeof(PagedKv) == 112, "params.rs says 112 bytes");
static_assert(sizeof(AttendParams) == 232, "params.rs says 232 bytes");
static_assert(sizeof(TiledAttendParams) == 384, "params.rs says 384 bytes");
static_assert(sizeof(ScoreParams) == 256, "params.rs says 256 bytes");
static_assert(sizeof(WritePagesParams) == 144, "params.rs says 144 bytes");
static_assert(sizeof(PageBoundsParams) == 112, "params.rs says 112 bytes");
static_assert(sizeof(MergeStatesParams) == 56, "params.rs says 56 bytes");
static_assert(sizeof(RotatedVectors) == 56, "params.rs says 56 bytes");
static_assert(sizeof(RotateRowsParams) == 160, "params.rs says 160 bytes");
static_assert(sizeof(ScorePagesParams) == 152, "choice_params.rs says 152 bytes");
static_assert(sizeof(EstimatePagesParams) == 192, "choice_params.rs says 192 bytes");
static_assert(sizeof(SelectPagesParams) == 56, "choice_params.rs says 56 bytes");
static_assert(sizeof(GatherEntriesParams) == 96, "params.rs says 96 bytes");
static_assert(sizeof(RecyclePagesParams) == 160, "move_params.rs says 160 bytes");
static_assert(sizeof(RowPagesParams) == 40, "move_params.rs says 40 bytes");
static_assert(sizeof(MovePagesParams) == 112, "move_params.rs says 112 bytes");
static_assert(sizeof(MoveFp8PagesParams) == 120, "move_params.rs says 120 bytes");
static_assert(sizeof(PackPagesParams) == 120, "params.rs says 120 bytes");
static_assert(sizeof(AttendPackedParams) == 296, "params.rs says 296 bytes");
static_assert(sizeof(StepTablesParams) == 880, "params.rs says 880 bytes");
