//! Launch of `score_tokens.cu` and, on Hopper, the passes of `score_tokens_sm90.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::Pairing;

use crate::attend_plan::is_hopper;
use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{
    DeviceRows, DeviceTensor, blocks_of, bytes_of, factor_of, long, names_of, narrow,
};
use crate::paged::DeviceKv;
use crate::params::ScoreParams;
use crate::rounds::parts_of;

/// Head dims of the tensor-core kernels.
const TILED_DIMS: [usize; 5] = [64, 80, 96, 128, 256];
/// Vectors that a thread block of theirs may hold, the most first.
const HELD: [usize; 3] = [256, 128, 64];
/// Keys of the tiles that stream past it.
const TILE: usize = 64;
/// Largest head dim of Hopper's kernels, and the query vectors that a block of theirs has.
const HOPPER_DIM: usize = 128;
const HOPPER_HELD: usize = HELD[0];
/// Threads of theirs: four warpgroups that multiply, one that fetches.
const HOPPER_THREADS: u32 = 640;
/// Threads of every kernel but the plain passes.
const THREADS: u32 = 256;
/// Warps of the plain passes, each with one query vector or a few keys.
const PLAIN_WARPS: usize = 4;
const PLAIN_KEYS: usize = 4;
/// Parts of the keys in the first pass, at most: each leaves numbers for every (row, query head).
const MAX_SPLITS: usize = 64;
/// Where the parts of the workspace start.
const ALIGNMENT: usize = 256;

/// Attention mass of every key of one request: `kvweave_core::ops::ScoreTokens`, whose checks are
/// the caller's where the tables are on the host.
#[derive(Clone, Copy, Debug)]
pub struct ScoreTokensLaunch<'a> {
    /// Keys of the request; values are not read. With a reach `entry_offsets` is [tables + 1],
    /// otherwise [2].
    pub kv: DeviceKv<'a>,
    /// The probing rows, [R, H, D]. Tensor cores take rows of the cache's dtype and heads that
    /// start on 16-byte boundaries; others are scored by the plain kernels.
    pub q: DeviceRows,
    /// Elements of `q`: the cache's, or any others over fp8.
    pub dtype: KvDtype,
    /// i32 [R].
    pub positions: DeviceTensor,
    /// f32 [keys], by position: all of it is written. Keys at positions from `keys` on are not
    /// read, so this is as long as the largest end of an entry.
    pub mass: DeviceTensor,
    /// Mass far from the row, where it is wanted.
    pub edge: Option<EdgeLaunch>,
    /// Bytes on a 16-byte boundary, as many as the call's plan says; what they hold before and
    /// after is no matter.
    pub workspace: DeviceTensor,
    /// Factor on qᵀk.
    pub scale: f32,
    /// Soft cap c > 0.
    pub softcap: Option<f32>,
    /// R.
    pub rows: usize,
    /// H.
    pub query_heads: usize,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

/// `kvweave_core::ops::EdgeMass` on the device.
#[derive(Clone, Copy, Debug)]
pub struct EdgeLaunch {
    /// Latest keys that are not edge, the row itself included; at least 1.
    pub window: u32,
    /// Keys at the start of the sequence that are not edge.
    pub sink: u32,
    /// f32 [R, H], contiguous.
    pub share: DeviceTensor,
}

impl CudaBackend {
    /// How the work of a call is cut, whose own `workspace` is not looked at.
    ///
    /// # Errors
    /// `InvalidArgument` for query heads that KV heads do not divide.
    pub fn plan_score_tokens(&self, call: &ScoreTokensLaunch<'_>) -> Result<ScorePlan, CudaError> {
        let plan = self.plan(call)?;
        Ok(ScorePlan { plan, workspace: Workspace::of(call, &plan) })
    }

    /// Puts the scoring on the stream: five kernels. Nothing is waited for, nothing allocated, and
    /// the same call gives the same bits.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernels, offsets split their tables, `plan` is that of the call, and `stream` is a
    /// stream of this device.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Unsupported` for a head dim that
    /// no kernel takes, `Driver` when a launch fails.
    pub unsafe fn score_tokens(
        &self,
        call: &ScoreTokensLaunch<'_>,
        ScorePlan { plan, workspace }: &ScorePlan,
    ) -> Result<(), CudaError> {
        if call.mass.len == 0 {
            return Ok(());
        }
        let params = params_of(call, plan, workspace)?;
        for launch in plan.launches(call)? {
            // SAFETY: the params mirror the kernels' struct; addresses are the caller's promise.
            unsafe {
                self.launch((launch.source, &launch.kernel), launch.grid, call.stream, &params)?
            };
        }
        Ok(())
    }

    fn plan(&self, call: &ScoreTokensLaunch<'_>) -> Result<Plan, CudaError> {
        let geometry = &call.kv.geometry;
        let (heads, kv_heads) = (call.query_heads, geometry.kv_heads);
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let expected = format!("a positive multiple of {kv_heads} KV heads");
            return Err(CudaError::invalid("query heads", expected, heads));
        }
        let size = Size {
            vectors: call.rows * (heads / kv_heads),
            kv_heads,
            keys: call.mass.len,
            head_dim: geometry.head_dim,
        };
        let fits = |bytes: usize| self.context.device.gives(bytes);
        let best = if !is_tiled(call) || !fits(shared_bytes(geometry.head_dim)) {
            Kind::Plain
        } else if is_hopper(&self.context.device) && fits(hopper_bytes(geometry.head_dim)) {
            Kind::Hopper
        } else {
            Kind::Tiled
        };
        Ok(Plan::of(&size, best, self.processors() as usize))
    }
}

/// Whether tensor cores take the call.
fn is_tiled(call: &ScoreTokensLaunch<'_>) -> bool {
    let (geometry, kv) = (&call.kv.geometry, &call.kv);
    let strides = [
        geometry.block_stride,
        geometry.head_stride,
        geometry.token_stride,
        call.q.row_stride,
        call.q.head_stride,
    ];
    kv.dtype != KvDtype::F32
        && kv.dtype == call.dtype
        && TILED_DIMS.contains(&geometry.head_dim)
        && call.scale > 0.0
        && (kv.pairs.is_multiple_of(2) || kv.pairing == Pairing::Interleaved)
        && [kv.cache.address, call.q.tensor.address].iter().all(|at| at.is_multiple_of(16))
        && strides.iter().all(|stride| (stride * bytes_of(kv.dtype)).is_multiple_of(16))
}

/// Shared memory of a tensor-core kernel: `Shared` of `score_tiles.cuh`.
fn shared_bytes(head_dim: usize) -> usize {
    8256 + 4 * head_dim + 4 * TILE * (2 * head_dim + 16)
}

/// Likewise of `score_tokens_sm90.cu`, with room to start on a boundary.
fn hopper_bytes(head_dim: usize) -> usize {
    let tiles = head_dim.div_ceil(64) * (HOPPER_HELD + 4 * 128) * 128;
    tiles + 4288 + 16 * head_dim + 1024
}

/// Which kernels do the two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    Tiled,
    Hopper,
}

/// What decides how the work is cut.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Query vectors of a KV head.
    vectors: usize,
    kv_heads: usize,
    keys: usize,
    head_dim: usize,
}

/// How the work is cut; the same for the same sizes, and so are the results' bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    kind: Kind,
    vectors: usize,
    /// Query vectors that a thread block holds in the first pass.
    rows_held: usize,
    /// Keys that it holds in the second; on Hopper it holds query vectors there too.
    keys_held: usize,
    splits: usize,
    padded_keys: usize,
    /// Parts of the query vectors that masses are summed over one by one.
    mass_parts: usize,
}

struct Launch {
    /// Basename in `csrc`.
    source: &'static str,
    kernel: String,
    grid: Grid,
}

impl Plan {
    /// The cut for the best kernels that take the call; Hopper's are for many query vectors.
    fn of(size: &Size, best: Kind, processors: usize) -> Self {
        let Size { vectors, kv_heads, keys, head_dim } = *size;
        let least = HELD[HELD.len() - 1];
        // The most that leaves no more than a quarter of its places empty.
        let wastes_little = |held: &usize| {
            let places = vectors.next_multiple_of(*held);
            places - vectors <= places / 4
        };
        let rows_held = HELD.into_iter().find(wastes_little).unwrap_or(least);
        let fills = |held: &usize| keys.div_ceil(*held) * kv_heads >= 2 * processors;
        let keys_held = HELD.into_iter().find(fills).unwrap_or(least);
        // Their second pass has a thread block for each of the held ones: none for no vector.
        let is_large = vectors > 0 && rows_held == HOPPER_HELD && head_dim <= HOPPER_DIM;
        let kind = if best == Kind::Hopper && !is_large { Kind::Tiled } else { best };
        let at_once = if kind == Kind::Hopper || head_dim > 128 { 1 } else { 2 } * processors;
        let items = if kind == Kind::Plain { PLAIN_WARPS } else { rows_held };
        let most = keys.div_ceil(4 * TILE).clamp(1, MAX_SPLITS);
        Self {
            kind,
            vectors,
            rows_held,
            keys_held,
            splits: parts_of(vectors.div_ceil(items) * kv_heads, at_once, most),
            padded_keys: keys.next_multiple_of(HELD[0]),
            mass_parts: if kind == Kind::Hopper { 2 * vectors.div_ceil(HOPPER_HELD) } else { 1 },
        }
    }

    /// The kernels of a call, in order. Without rows there is nothing to normalise by.
    fn launches(&self, call: &ScoreTokensLaunch<'_>) -> Result<Vec<Launch>, CudaError> {
        let kv_heads = narrow("kv_heads", call.kv.geometry.kv_heads)?;
        let simple = |name: &str, items: usize, rows: u32| -> Result<Launch, CudaError> {
            let blocks = [blocks_of("rows and keys", items.div_ceil(THREADS as usize))?, rows, 1];
            let grid = Grid { blocks, threads: THREADS, shared_bytes: 0 };
            Ok(Launch { source: "score_tokens", kernel: format!("score_tokens_{name}"), grid })
        };
        let tables = narrow("tables", call.kv.tables())?;
        let [rows, keys] = self.passes(call, kv_heads)?;
        let mut launches = vec![simple("find", self.padded_keys, tables)?];
        if self.vectors > 0 {
            launches.push(rows);
            launches.push(simple("merge", self.vectors * kv_heads as usize, 1)?);
        }
        launches.push(keys);
        launches.push(simple("sum", call.mass.len, 1)?);
        Ok(launches)
    }

    /// The two passes.
    fn passes(
        &self,
        call: &ScoreTokensLaunch<'_>,
        kv_heads: u32,
    ) -> Result<[Launch; 2], CudaError> {
        let (dim, dtype) = (call.kv.geometry.head_dim, names_of(call.dtype, call.kv.dtype));
        let splits = narrow("splits", self.splits)?;
        let row_blocks = |items: usize| self.vectors.div_ceil(items);
        let key_blocks = |items: usize| (self.padded_keys / items, 1);
        let (source, prefix, suffix, shared) = match self.kind {
            Kind::Plain => ("score_tokens", "score_tokens", format!("plain_{dtype}"), 0),
            Kind::Tiled => {
                ("score_tokens", "score_tokens", format!("{dtype}_{dim}"), shared_bytes(dim))
            }
            Kind::Hopper => {
                let name = "score_tokens_sm90";
                (name, name, format!("{dtype}_{dim}"), hopper_bytes(dim))
            }
        };
        let (first, (second, second_splits), threads) = match self.kind {
            Kind::Plain => {
                let keys = key_blocks(PLAIN_WARPS * PLAIN_KEYS);
                (row_blocks(PLAIN_WARPS), keys, 32 * PLAIN_WARPS as u32)
            }
            Kind::Tiled => (row_blocks(self.rows_held), key_blocks(self.keys_held), THREADS),
            Kind::Hopper => {
                let blocks = row_blocks(HOPPER_HELD);
                (blocks, (blocks, splits), HOPPER_THREADS)
            }
        };
        let pass = |name: &str, blocks: usize, splits: u32| -> Result<Launch, CudaError> {
            let blocks = [blocks_of("rows and keys", blocks)?, kv_heads, splits];
            let grid = Grid { blocks, threads, shared_bytes: narrow("head_dim", shared)? };
            Ok(Launch { source, kernel: format!("{prefix}_{name}_{suffix}"), grid })
        };
        Ok([pass("rows", first, splits)?, pass("keys", second, second_splits)?])
    }
}

/// How a call is carried out.
#[derive(Clone, Copy, Debug)]
pub struct ScorePlan {
    plan: Plan,
    workspace: Workspace,
}

impl ScorePlan {
    /// Bytes of workspace.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes
    }
}

/// Offsets of the workspace's parts, in bytes.
#[derive(Clone, Copy, Debug)]
struct Workspace {
    delta_at: usize,
    partial: usize,
    lse: usize,
    head_mass: usize,
    bytes: usize,
}

impl Workspace {
    fn of(call: &ScoreTokensLaunch<'_>, plan: &Plan) -> Self {
        let places = call.kv.tables() * plan.padded_keys;
        let states = call.kv.geometry.kv_heads * plan.vectors;
        let after = |start: usize, bytes: usize| (start + bytes).next_multiple_of(ALIGNMENT);
        let delta_at = after(0, places * size_of::<i64>());
        let partial = after(delta_at, places * size_of::<i32>());
        let lse = after(partial, 3 * plan.splits * states * size_of::<f32>());
        let head_mass = after(lse, states * size_of::<f32>());
        let masses = plan.mass_parts * call.kv.geometry.kv_heads * plan.padded_keys;
        let bytes = after(head_mass, masses * size_of::<f32>());
        Self { delta_at, partial, lse, head_mass, bytes }
    }
}

fn params_of(
    call: &ScoreTokensLaunch<'_>,
    plan: &Plan,
    workspace: &Workspace,
) -> Result<ScoreParams, CudaError> {
    let (rows, heads) = (call.rows, call.query_heads);
    let cap = call.softcap.unwrap_or(1.0);
    let scale = call.scale * call.kv.scales.key;
    if !(scale.is_finite() && cap.is_finite() && cap > 0.0) {
        let (expected, got) = ("finite numbers, softcap above 0", (scale, cap));
        return Err(CudaError::invalid("scale and softcap", expected, format!("{got:?}")));
    }
    call.q.expect("q", (rows, heads, call.kv.geometry.head_dim))?;
    call.positions.expect("positions", rows)?;
    if let Some(edge) = &call.edge {
        edge.share.expect("edge", rows * heads)?;
        if edge.window == 0 {
            return Err(CudaError::invalid("window of edge", "at least 1", 0));
        }
    }
    call.workspace.expect("workspace", workspace.bytes)?;
    let group = heads / call.kv.geometry.kv_heads;
    // Kernels count in 32 bits, and divide by the group with one multiplication.
    let limit = i32::MAX as usize;
    if plan.vectors.saturating_mul(group) > limit || plan.padded_keys > limit {
        let got = format!("{rows} rows and {} keys", call.mass.len);
        return Err(CudaError::unsupported("rows and keys", format!("at most {limit}"), got));
    }
    let at = |offset: usize| call.workspace.address + offset as u64;
    let signed = |count: u32| count.min(i32::MAX.cast_unsigned());
    Ok(ScoreParams {
        kv: call.kv.params(1)?,
        q: call.q.tensor.address,
        positions: call.positions.address,
        mass: call.mass.address,
        edge: call.edge.map_or(0, |edge| edge.share.address),
        key_at: at(0),
        delta_at: at(workspace.delta_at),
        partial: at(workspace.partial),
        lse: at(workspace.lse),
        head_mass: at(workspace.head_mass),
        q_row_stride: long("q", call.q.row_stride)?,
        q_head_stride: long("q", call.q.head_stride)?,
        scale,
        softcap: call.softcap.unwrap_or(0.0),
        rows: narrow("rows", rows)?,
        query_heads: narrow("query heads", heads)?,
        keys: narrow("mass", call.mass.len)?,
        padded_keys: narrow("mass", plan.padded_keys)?,
        splits: narrow("splits", plan.splits)?,
        rows_held: narrow("rows", plan.rows_held)?,
        keys_held: narrow("keys", plan.keys_held)?,
        edge_window: call.edge.map_or(1, |edge| signed(edge.window)),
        edge_sink: call.edge.map_or(0, |edge| signed(edge.sink)),
        group_factor: factor_of("group", group)?,
        mass_parts: narrow("rows", plan.mass_parts)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: usize = 132;

    fn plan(vectors: usize, kv_heads: usize, keys: usize) -> Plan {
        Plan::of(&Size { vectors, kv_heads, keys, head_dim: 128 }, Kind::Tiled, H200)
    }

    #[test]
    fn few_rows_are_split_until_the_device_is_full() {
        let plan = plan(256, 8, 32768);
        assert_eq!((plan.rows_held, plan.keys_held, plan.padded_keys), (256, 256, 32768));
        assert!((30..=33).contains(&plan.splits), "{plan:?}");
    }

    #[test]
    fn no_rows_leave_no_empty_grid() {
        let size = Size { vectors: 0, kv_heads: 2, keys: 60, head_dim: 64 };
        let plan = Plan::of(&size, Kind::Hopper, H200);
        assert_eq!((plan.kind, plan.mass_parts), (Kind::Tiled, 1), "{plan:?}");
    }

    #[test]
    fn hopper_is_asked_for_many_rows_of_short_vectors() {
        let kind = |vectors, head_dim| {
            let size = Size { vectors, kv_heads: 8, keys: 32768, head_dim };
            let plan = Plan::of(&size, Kind::Hopper, H200);
            (plan.kind, plan.mass_parts)
        };
        assert_eq!(kind(1024, 128), (Kind::Hopper, 8));
        assert_eq!(kind(1000, 64), (Kind::Hopper, 8));
        assert_eq!(kind(1024, 256), (Kind::Tiled, 1));
        assert_eq!(kind(64, 128), (Kind::Tiled, 1));
    }

    #[test]
    fn blocks_hold_what_wastes_few_places() {
        let held = |vectors| plan(vectors, 8, 32768).rows_held;
        let counts = [1, 64, 96, 130, 200, 4096, 4097];
        assert_eq!(counts.map(held), [64, 64, 128, 64, 256, 256, 256]);
    }

    #[test]
    fn short_contexts_are_cut_finer() {
        assert_eq!(plan(256, 8, 4096).keys_held, 64);
        let tiny = plan(4, 1, 1);
        assert_eq!((tiny.splits, tiny.padded_keys), (1, 256));
    }
}
