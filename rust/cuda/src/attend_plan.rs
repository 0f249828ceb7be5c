//! Which kernel does a call of attention, and how its work is cut: plain numbers, made from the
//! shapes of a call and what the device is.

use kvweave_core::KvDtype;
use kvweave_core::ops::PageGeometry;

use crate::attend_call::{AttendLaunch, AttendWorkspace};
use crate::error::CudaError;
use crate::ffi::{Description, Grid};
use crate::operands::{blocks_of, bytes_of, names_of};
use crate::rounds::parts_of;

/// (Request, KV head, 8 query heads) triples of one launch of `attend_decode.cu`: its `kMaxItems`.
const MAX_ITEMS: usize = 1024;
/// Query heads that one of them has at most: its `kQueries`.
pub(crate) const QUERIES: usize = 8;
/// Thread blocks that first add up among themselves: `kGroup` in `decode_merge.cuh`.
const GROUP: usize = 8;
/// Thread blocks of a grid's second axis.
const MAX_ROWS_OF_BLOCKS: usize = 65535;
/// Parts of the keys of prefill, at most: each leaves its results as floats.
const MAX_SPLITS: usize = 32;
/// Keys that are worth a part of their own.
const KEYS_A_SPLIT: usize = 1024;
/// Warps of a thread block of the plain kernel, each with one (row, query head).
const PLAIN_WARPS: usize = 4;
const WARP: u32 = 32;
/// Tokens that a bulk copy takes at once.
pub(crate) const BULK_TOKENS: usize = 16;
/// Tokens of a page that other copies of decode take side by side.
pub(crate) const COPIED_TOKENS: usize = 8;
/// Tokens of a page from which on Hopper's prefill copies all of them with 64 columns at once; of
/// smaller pages it copies 16 tokens with all columns.
const TALL_TOKENS: usize = 64;
/// Bytes between the addresses that tensor-core kernels copy from.
const ALIGNMENT: usize = 16;

/// What is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    Decode(DecodePlan),
    Prefill(PrefillPlan),
    /// `attend_plain.cu`.
    Plain {
        kernel: String,
    },
}

/// `attend_decode_sm90.cu`, or without `hopper` `attend_decode.cu`: so many requests a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DecodePlan {
    pub(crate) kernel: String,
    pub(crate) grid: Grid,
    pub(crate) hopper: bool,
    pub(crate) requests: usize,
}

/// `attend_prefill_sm90.cu`, or without `hopper` `attend_prefill.cu`; then a merge when there is
/// more than one split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefillPlan {
    pub(crate) kernel: String,
    pub(crate) grid: Grid,
    pub(crate) hopper: bool,
}

/// How a call of attention is carried out, and the workspace that this takes.
#[derive(Clone, Debug)]
pub struct AttendPlan {
    plan: Plan,
    workspace: AttendWorkspace,
}

impl AttendPlan {
    pub(crate) fn of(call: &AttendLaunch<'_>, device: &Description) -> Self {
        let plan = Plan::of(call, device);
        let workspace = AttendWorkspace { floats: plan.floats(call), counters: plan.counters() };
        Self { plan, workspace }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the call needs of workspace.
    #[must_use]
    pub fn workspace(&self) -> AttendWorkspace {
        self.workspace
    }
}

/// A kernel of one head dim: D, threads of a thread block and its shared memory.
struct Tile {
    head_dim: usize,
    threads: u32,
    shared_bytes: u32,
}

const fn tile(head_dim: usize, threads: u32, shared_bytes: u32) -> Tile {
    Tile { head_dim, threads, shared_bytes }
}

/// As `SHAPE` in `attend_decode.cu` has them: on Hopper, and elsewhere.
const DECODE_ON_HOPPER: [Tile; 5] = [
    tile(64, 256, 171056),
    tile(80, 256, 203824),
    tile(96, 256, 183216),
    tile(128, 256, 232368),
    tile(256, 128, 224736),
];
const DECODE_ELSEWHERE: [Tile; 5] = [
    tile(64, 128, 95776),
    tile(80, 128, 66976),
    tile(96, 128, 75168),
    tile(128, 128, 91552),
    tile(256, 128, 157088),
];
/// As `FP8_SHAPE` there has them.
const FP8_DECODE_ON_HOPPER: [Tile; 4] =
    [tile(64, 512, 187728), tile(96, 512, 196176), tile(128, 512, 171856), tile(256, 256, 162608)];
const FP8_DECODE_ELSEWHERE: [Tile; 4] =
    [tile(64, 256, 84144), tile(96, 256, 80432), tile(128, 256, 97072), tile(256, 128, 91552)];
/// As `KERNELS` and `FP8_KERNELS` in `attend_decode_sm90.cu` have them.
const HOPPER_DECODE: [Tile; 2] = [tile(64, 256, 188416), tile(128, 256, 221184)];
const HOPPER_FP8_DECODE: [Tile; 1] = [tile(128, 512, 156672)];
/// As `KERNELS` in `attend_prefill_sm90.cu` has them.
const HOPPER_PREFILL: [Tile; 2] = [tile(64, 384, 104248), tile(128, 384, 203064)];
/// (row, query head) pairs of a thread block there.
const HOPPER_PAIRS: usize = 128;
/// As `KERNELS` and `FP8_KERNELS` in `attend_prefill.cu` have them.
const PREFILL: [Tile; 5] = [
    tile(64, 128, 47344),
    tile(80, 128, 57648),
    tile(96, 128, 67952),
    tile(128, 128, 88560),
    tile(256, 128, 170992),
];
const FP8_PREFILL: [Tile; 5] = [
    tile(64, 128, 45296),
    tile(80, 128, 55600),
    tile(96, 128, 65904),
    tile(128, 128, 86512),
    tile(256, 128, 168944),
];
/// (row, query head) pairs of a thread block there.
const PREFILL_PAIRS: usize = 64;

impl Plan {
    fn of(call: &AttendLaunch<'_>, device: &Description) -> Self {
        let found = if !has_tensor_core_layout(call) {
            None
        } else if call.row_offsets.is_none() {
            decode(call, device)
        } else {
            hopper_prefill(call, device).or_else(|| prefill(call, device))
        };
        found.unwrap_or_else(|| Self::Plain {
            kernel: format!("attend_plain_{}", names_of(call.dtype, call.kv.dtype)),
        })
    }

    /// Floats of workspace.
    fn floats(&self, call: &AttendLaunch<'_>) -> usize {
        let head_dim = call.kv.geometry.head_dim;
        match self {
            Self::Decode(DecodePlan { grid, .. }) => decode_workspace(grid, head_dim).floats,
            Self::Prefill(PrefillPlan { grid, .. }) if grid.blocks[2] > 1 => {
                grid.blocks[2] as usize * call.rows * call.query_heads * (head_dim + 1)
            }
            _ => 0,
        }
    }

    /// Counters of workspace: zero before and after.
    fn counters(&self) -> usize {
        match self {
            Self::Decode(DecodePlan { grid, .. }) => decode_workspace(grid, 0).counters,
            _ => 0,
        }
    }
}

/// What decode's thread blocks leave for each other: two parts a block and a group of them, each
/// with its values, largest scores and sums; counters of items, and two a group.
pub(crate) fn decode_workspace(grid: &Grid, head_dim: usize) -> AttendWorkspace {
    let blocks = grid.blocks[0] as usize;
    let groups = blocks.div_ceil(GROUP);
    AttendWorkspace {
        floats: 2 * (blocks + groups) * QUERIES * (head_dim + 2),
        counters: MAX_ITEMS + 2 * groups,
    }
}

/// The grid of the kernels that give each (row, query head) a warp: plain, and the merge.
pub(crate) fn warps(call: &AttendLaunch<'_>) -> Result<Grid, CudaError> {
    let states = call.rows * call.query_heads;
    let blocks = [blocks_of("rows", states.div_ceil(PLAIN_WARPS))?, 1, 1];
    Ok(Grid { blocks, threads: PLAIN_WARPS as u32 * WARP, shared_bytes: 0 })
}

/// Whether vectors lie as tensor-core kernels copy them: rows of 16 bits an element, 16-byte
/// boundaries, pages of whole groups of 8 tokens.
fn has_tensor_core_layout(call: &AttendLaunch<'_>) -> bool {
    let geometry = &call.kv.geometry;
    let aligned = |strides: &[usize], dtype: KvDtype| {
        strides.iter().all(|stride| (stride * bytes_of(dtype)).is_multiple_of(ALIGNMENT))
    };
    let of_cache = [
        geometry.block_stride,
        geometry.layer_stride,
        geometry.head_stride,
        geometry.token_stride,
        geometry.value_offset,
    ];
    call.dtype != KvDtype::F32
        && geometry.page_tokens.is_multiple_of(8)
        && aligned(&of_cache, call.kv.dtype)
        && aligned(&[call.q.row_stride, call.q.head_stride], call.dtype)
        && [call.kv.cache.address, call.q.tensor.address, call.out.address]
            .iter()
            .all(|address| address.is_multiple_of(ALIGNMENT as u64))
}

pub(crate) fn is_hopper(device: &Description) -> bool {
    device.capability == (9, 0)
}

fn find<'a>(tiles: &'a [Tile], head_dim: usize, device: &Description) -> Option<&'a Tile> {
    let tile = tiles.iter().find(|tile| tile.head_dim == head_dim)?;
    device.gives(tile.shared_bytes as usize).then_some(tile)
}

fn decode(call: &AttendLaunch<'_>, device: &Description) -> Option<Plan> {
    let geometry = &call.kv.geometry;
    let bulk = is_hopper(device) && geometry.page_tokens.is_multiple_of(BULK_TOKENS);
    let tiles: [&[Tile]; 3] = if call.kv.dtype.is_quantised() {
        [&HOPPER_FP8_DECODE, &FP8_DECODE_ON_HOPPER, &FP8_DECODE_ELSEWHERE]
    } else {
        [&HOPPER_DECODE, &DECODE_ON_HOPPER, &DECODE_ELSEWHERE]
    };
    let bulk = if bulk { find(tiles[0], geometry.head_dim, device) } else { None };
    let copied = tiles[if is_hopper(device) { 1 } else { 2 }];
    let tile = bulk.or_else(|| find(copied, geometry.head_dim, device))?;
    let items = geometry.kv_heads * call.group().div_ceil(QUERIES);
    let requests = MAX_ITEMS / items;
    let grid = Grid {
        blocks: [device.processors, 1, 1],
        threads: tile.threads,
        shared_bytes: tile.shared_bytes,
    };
    let source = if bulk.is_some() { "attend_decode_sm90" } else { "attend_decode" };
    let kernel = format!("{source}_{}_{}", names_of(call.dtype, call.kv.dtype), geometry.head_dim);
    let plan = DecodePlan { kernel, grid, hopper: bulk.is_some(), requests };
    (requests > 0).then_some(Plan::Decode(plan))
}

/// Whether Hopper's prefill copies a page's tokens at once.
pub(crate) fn is_tall(geometry: &PageGeometry) -> bool {
    geometry.page_tokens >= TALL_TOKENS
}

fn hopper_prefill(call: &AttendLaunch<'_>, device: &Description) -> Option<Plan> {
    let geometry = &call.kv.geometry;
    let tile = find(&HOPPER_PREFILL, geometry.head_dim, device)?;
    let pages = [16, 32, 64, 128].contains(&geometry.page_tokens);
    let plain = call.scale > 0.0 && call.softcap.is_none() && !call.kv.dtype.is_quantised();
    if !(is_hopper(device) && pages && plain) {
        return None;
    }
    let grid = prefill_grid(call, tile, HOPPER_PAIRS, device.processors as usize)?;
    let names = names_of(call.dtype, call.kv.dtype);
    let kernel = format!("attend_prefill_sm90_{names}_{}", geometry.head_dim);
    let kernel = if is_tall(geometry) { kernel + "_tall" } else { kernel };
    Some(Plan::Prefill(PrefillPlan { kernel, grid, hopper: true }))
}

fn prefill(call: &AttendLaunch<'_>, device: &Description) -> Option<Plan> {
    let geometry = &call.kv.geometry;
    let tiles = if call.kv.dtype.is_quantised() { &FP8_PREFILL } else { &PREFILL };
    let tile = find(tiles, geometry.head_dim, device)?;
    if geometry.page_tokens > 64 {
        return None;
    }
    let at_once = if geometry.head_dim > 128 { 1 } else { 2 } * device.processors as usize;
    let grid = prefill_grid(call, tile, PREFILL_PAIRS, at_once)?;
    let names = names_of(call.dtype, call.kv.dtype);
    let kernel = format!("attend_prefill_{names}_{}", geometry.head_dim);
    Some(Plan::Prefill(PrefillPlan { kernel, grid, hopper: false }))
}

/// One thread block for each tile of pairs and KV head, as if every request began a tile of its
/// own; with few of them the keys are split until rounds of `at_once` thread blocks are full.
fn prefill_grid(
    call: &AttendLaunch<'_>,
    tile: &Tile,
    pairs: usize,
    at_once: usize,
) -> Option<Grid> {
    let geometry = &call.kv.geometry;
    let all = call.rows * call.group();
    let tiles = if call.requests == 1 { all.div_ceil(pairs) } else { all / pairs + call.requests };
    let keys = call.kv.entries.len / 5 * geometry.page_tokens / call.requests.max(1);
    let seen = call.kv.window.map_or(keys, |window| keys.min(window as usize));
    let most = seen.div_ceil(KEYS_A_SPLIT).clamp(1, MAX_SPLITS);
    let splits = if call.kv.reach.is_some() {
        // Where heads see different windows, those of most tiles are worth no split.
        (at_once / (tiles * geometry.kv_heads).max(1)).clamp(1, most)
    } else {
        splits_of(tiles * geometry.kv_heads, at_once, most)
    };
    (tiles <= MAX_ROWS_OF_BLOCKS).then_some(Grid {
        blocks: [geometry.kv_heads as u32, tiles as u32, splits as u32],
        threads: tile.threads,
        shared_bytes: tile.shared_bytes,
    })
}

/// Parts of the keys for so many tiles, `at_once` of which run at the same time. Tiles that all
/// begin at once are split even so: they last as long as the one that sees most.
fn splits_of(tiles: usize, at_once: usize, most: usize) -> usize {
    let splits = parts_of(tiles, at_once, most);
    if splits == 1 && tiles <= at_once { most.min(2) } else { splits }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of a source's lines `NAME(1, 2, …)`.
    fn lines_of(source: &str, name: &str) -> Vec<Vec<u32>> {
        let line = |line: &str| {
            let inner = line.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')')?;
            inner.split(", ").map(|number| number.parse().ok()).collect()
        };
        source.lines().filter_map(line).collect()
    }

    fn same(tiles: &[Tile], lines: &[[u32; 3]]) {
        let tiles = tiles.iter().map(|t| [t.head_dim as u32, t.threads, t.shared_bytes]);
        assert_eq!(tiles.collect::<Vec<_>>(), lines);
    }

    #[test]
    fn tiles_of_prefill_are_split_until_rounds_are_full() {
        // Of 132 processors: few tiles, a round and a bit, one full round, two, and many.
        for (tiles, splits) in [(17, 7), (32, 4), (65, 2), (136, 7), (132, 2), (257, 1), (1056, 1)]
        {
            assert_eq!(splits_of(tiles, 132, 32), splits, "{tiles} tiles");
        }
        assert_eq!(splits_of(136, 132, 1), 1);
        assert_eq!(splits_of(1, 132, 32), 32);
    }

    #[test]
    fn groups_are_those_of_the_source() {
        let merge = include_str!("../../../csrc/decode_merge.cuh");
        assert!(merge.contains(&format!("constexpr int kGroup = {GROUP};")));
    }

    #[test]
    fn tiles_are_those_of_the_sources() {
        let decode = include_str!("../../../csrc/attend_decode.cu");
        let shapes: [(_, &[Tile], &[Tile]); 2] = [
            ("SHAPE", &DECODE_ON_HOPPER, &DECODE_ELSEWHERE),
            ("FP8_SHAPE", &FP8_DECODE_ON_HOPPER, &FP8_DECODE_ELSEWHERE),
        ];
        for (name, on_hopper, elsewhere) in shapes {
            let lines = lines_of(decode, name);
            let of = |warps: usize, bytes: usize| -> Vec<_> {
                lines.iter().map(|n| [n[0], n[warps] * WARP, n[bytes]]).collect()
            };
            same(on_hopper, &of(1, 3));
            same(elsewhere, &of(4, 6));
        }
        let bulk = include_str!("../../../csrc/attend_decode_sm90.cu");
        let tiles: [(_, &[Tile]); 2] =
            [("KERNELS", &HOPPER_DECODE), ("FP8_KERNELS", &HOPPER_FP8_DECODE)];
        for (name, tiles) in tiles {
            let lines = lines_of(bulk, name);
            same(tiles, &lines.iter().map(|n| [n[0], n[1] * WARP, n[3]]).collect::<Vec<_>>());
        }
        let hopper = lines_of(include_str!("../../../csrc/attend_prefill_sm90.cu"), "KERNELS");
        same(&HOPPER_PREFILL, &hopper.iter().map(|n| [n[0], 384, n[1]]).collect::<Vec<_>>());
        let prefill = include_str!("../../../csrc/attend_prefill.cu");
        for (name, tiles) in [("KERNELS", &PREFILL), ("FP8_KERNELS", &FP8_PREFILL)] {
            let lines = lines_of(prefill, name);
            same(tiles, &lines.iter().map(|n| [n[0], 128, n[2]]).collect::<Vec<_>>());
        }
    }
}
