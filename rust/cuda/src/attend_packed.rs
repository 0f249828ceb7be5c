//! Launch of `attend_packed.cu`, `attend_top_r.cu` and `attend_planes.cu`.

use kvweave_core::KvDtype;
use kvweave_core::ops::{KeptNumbers, PackedFormat, PackedKind, PageGeometry, ScaleDtype};

use crate::attend::params_of;
use crate::attend_call::{AttendLaunch, AttendWorkspace};
use crate::attend_decode::of_requests;
use crate::attend_plan::{QUERIES, decode_workspace, is_hopper};
use crate::backend::CudaBackend;
use crate::bases::{DeviceBases, bases_params, top_r_params};
use crate::error::CudaError;
use crate::ffi::{Description, Grid};
use crate::operands::{bytes_of, factor_of, last_start, name_of, narrow};
use crate::paged::DeviceKv;
use crate::params::{AttendPackedParams, AttendParams};

/// (Request, KV head, 8 query heads) triples of one launch: `kPackedItems` of the kernels.
const MAX_ITEMS: usize = 512;
/// Query heads of a product of bytes: `kTileHeads` of the kernels.
const TILE_HEADS: usize = 4;
/// Pages that a warp has in shared memory.
const STAGES: usize = 2;
/// Tokens that the kernels take in at once, of planes and of others: a page may have fewer.
const PLANES_AT_ONCE: usize = 64;
const AT_ONCE: usize = 32;
/// Bytes of a plane that are read at once of a token: it may have fewer.
const PLANE_GROUPS_BYTES: usize = 64;
/// Bytes that are read at once of a vector's codes: it may have fewer.
const CODES_BYTES: usize = 128;
/// Bytes between the addresses that pages are copied from.
const PAGE_ALIGNMENT: u64 = 16;
const ROW_ALIGNMENT: usize = 4;
const WARP: u32 = 32;

/// Bytes of selectors that kernels of codes have on Hopper alone: `kFewerSelectors` elsewhere.
const FEWER_SELECTORS: usize = 31 * 256 * 4;

/// A kernel of one head dim: D, its warps, and shared memory beside stages.
struct Shape {
    head_dim: usize,
    warps: usize,
    own_bytes: usize,
}

/// As `KERNELS` in `attend_packed.cu` have them.
const SHAPES: [Shape; 2] = [
    Shape { head_dim: 64, warps: 16, own_bytes: 17536 },
    Shape { head_dim: 128, warps: 12, own_bytes: 15744 },
];
/// As those in `attend_top_r.cu`, of numbers of bytes and of codes.
const TOP_R_SHAPES: [Shape; 2] = [
    Shape { head_dim: 64, warps: 16, own_bytes: 38656 },
    Shape { head_dim: 128, warps: 12, own_bytes: 36864 },
];
const CODE_SHAPES: [Shape; 2] = [
    Shape { head_dim: 64, warps: 16, own_bytes: 71424 },
    Shape { head_dim: 128, warps: 12, own_bytes: 69504 },
];

/// As those in `attend_planes.cu`.
const PLANES_SHAPES: [Shape; 2] = [
    Shape { head_dim: 64, warps: 16, own_bytes: 41472 },
    Shape { head_dim: 128, warps: 12, own_bytes: 40704 },
];

/// The source of a format's kernels, how their names begin, and their shapes, for so many query
/// heads of a KV head.
fn kernels_of(
    format: &PackedFormat,
    heads: usize,
) -> Result<(&'static str, String, &'static [Shape]), CudaError> {
    let tiles = if heads > TILE_HEADS { "eight" } else { "four" };
    match format.kind() {
        kind @ (PackedKind::Int4 | PackedKind::Int8) => {
            Ok(("attend_packed", format!("attend_packed_{}", kind.name()), &SHAPES))
        }
        PackedKind::TopR(of) => {
            let prefix = format!("attend_top_r_{}", of.numbers.name());
            let whole = of.group == 1 && of.channels == format.head_dim();
            let bits = if whole { "whole" } else { "groups" };
            match of.numbers == KeptNumbers::Int4 {
                true => Ok(("attend_top_r", format!("{prefix}_{bits}_{tiles}"), &CODE_SHAPES)),
                false => Ok(("attend_top_r", format!("{prefix}_{bits}"), &TOP_R_SHAPES)),
            }
        }
        PackedKind::Planes(_) => {
            Ok(("attend_planes", format!("attend_planes_{tiles}"), &PLANES_SHAPES))
        }
        other => Err(CudaError::unsupported("kind", "a kind with kernels", other.name())),
    }
}

/// Elements of queries, and why: numbers of bf16 meet queries of bf16, others those of the scales.
fn queries_of(format: &PackedFormat) -> (KvDtype, &'static str) {
    let bf16_numbers = format.top_r().is_some_and(|page| page.of().numbers == KeptNumbers::Bf16);
    match format.scales() {
        _ if bf16_numbers => (KvDtype::Bf16, "numbers"),
        ScaleDtype::Bf16 => (KvDtype::Bf16, "scales"),
        ScaleDtype::F16 => (KvDtype::F16, "scales"),
    }
}

/// How a call of attention over packed pages is carried out, and the workspace that this takes.
#[derive(Clone, Debug)]
pub struct PackedPlan {
    source: &'static str,
    kernel: String,
    format: PackedFormat,
    grid: Grid,
    requests: usize,
    stage_bytes: usize,
    workers: usize,
}

impl PackedPlan {
    fn of(
        call: &AttendLaunch<'_>,
        format: &PackedFormat,
        device: &Description,
    ) -> Result<Self, CudaError> {
        let dim = format.head_dim();
        let (source, prefix, shapes) = kernels_of(format, call.group())?;
        let shape = shapes.iter().find(|shape| shape.head_dim == dim);
        let shape = shape.ok_or_else(|| CudaError::unsupported("head_dim", "64 or 128", dim))?;
        let (wanted, like) = queries_of(format);
        if call.dtype != wanted {
            let expected = format!("{}, as {like} are", name_of(wanted));
            return Err(CudaError::unsupported("q", expected, name_of(call.dtype)));
        }
        expect_layout(call)?;
        let stage_bytes = stage_bytes(format);
        let codes = format.top_r().is_some_and(|page| page.of().numbers == KeptNumbers::Int4);
        let fewer = if codes && !is_hopper(device) { FEWER_SELECTORS } else { 0 };
        let bytes = |workers: usize| shape.own_bytes - fewer + workers * STAGES * stage_bytes;
        let workers = (1..=shape.warps).rev().find(|&workers| device.gives(bytes(workers)));
        let workers = workers.ok_or_else(|| {
            let got = format!("{} bytes", bytes(1));
            CudaError::unsupported("page_tokens", "two pages in shared memory", got)
        })?;
        let items = call.kv.geometry.kv_heads * call.group().div_ceil(QUERIES);
        if items == 0 || items > MAX_ITEMS {
            let expected = format!("up to {MAX_ITEMS} groups of {QUERIES}");
            return Err(CudaError::unsupported("query heads", expected, call.query_heads));
        }
        let grid = Grid {
            blocks: [device.processors, 1, 1],
            threads: shape.warps as u32 * WARP,
            shared_bytes: narrow("page_tokens", bytes(workers))?,
        };
        Ok(Self {
            source,
            kernel: format!("{prefix}_{}_{dim}", name_of(wanted)),
            format: *format,
            grid,
            requests: MAX_ITEMS / items,
            stage_bytes,
            workers,
        })
    }

    /// What the call needs of workspace.
    #[must_use]
    pub fn workspace(&self) -> AttendWorkspace {
        decode_workspace(&self.grid, self.format.head_dim())
    }
}

/// Room for a page, for what is read behind its last tokens, and for a warp's part of the result.
fn stage_bytes(format: &PackedFormat) -> usize {
    let (dim, page_tokens) = (format.head_dim(), format.page_tokens());
    let tokens = page_tokens.next_multiple_of(AT_ONCE);
    let read = match format.kind() {
        PackedKind::Int4 | PackedKind::Int8 => {
            format.value_codes().start + tokens * dim * format.code_bits() / 8
        }
        PackedKind::Planes(token_bytes) => {
            let flags = format.page_bytes() - page_tokens * token_bytes;
            let tokens = page_tokens.next_multiple_of(PLANES_AT_ONCE);
            flags + tokens * token_bytes + PLANE_GROUPS_BYTES
        }
        PackedKind::TopR(of) if of.numbers == KeptNumbers::Int4 && tokens > page_tokens => {
            format.page_bytes() + (tokens - page_tokens) * of.kept / 2 + CODES_BYTES
        }
        _ => 0,
    };
    let part = QUERIES * (dim + 4) * size_of::<f32>();
    format.page_bytes().max(read).max(part).next_multiple_of(128)
}

/// Refuses vectors that do not lie as the kernel loads and stores them.
fn expect_layout(call: &AttendLaunch<'_>) -> Result<(), CudaError> {
    let strides = [call.q.row_stride, call.q.head_stride];
    let bytes = bytes_of(call.dtype);
    let rows = strides.iter().all(|stride| (stride * bytes).is_multiple_of(ROW_ALIGNMENT))
        && call.q.tensor.address.is_multiple_of(ROW_ALIGNMENT as u64);
    if !rows {
        let expected = format!("vectors on boundaries of {ROW_ALIGNMENT} bytes");
        return Err(CudaError::unsupported("q", expected, format!("strides {strides:?}")));
    }
    for (what, tensor) in [("packed pages", call.kv.cache), ("out", call.out)] {
        if !tensor.address.is_multiple_of(PAGE_ALIGNMENT) {
            let got = format!("an address {} bytes past one", tensor.address % PAGE_ALIGNMENT);
            let expected = format!("a boundary of {PAGE_ALIGNMENT} bytes");
            return Err(CudaError::unsupported(what, expected, got));
        }
    }
    Ok(())
}

/// The strides of packed pages in bytes, as if they had elements.
fn in_bytes(geometry: &PageGeometry, page_bytes: usize) -> PageGeometry {
    PageGeometry {
        block_stride: page_bytes,
        layer_stride: geometry.kv_heads * page_bytes,
        head_stride: page_bytes,
        token_stride: 0,
        // A vector behind it ends with the page, where a page is not smaller than a vector.
        value_offset: page_bytes.saturating_sub(geometry.head_dim),
        ..*geometry
    }
}

impl CudaBackend {
    /// How a call over packed pages is carried out; its own workspace is not looked at. The
    /// geometry of its cache is that of exact pages of as many tokens, the cache itself bytes.
    ///
    /// # Errors
    /// `Unsupported` for what no kernel takes.
    pub fn plan_packed(
        &self,
        call: &AttendLaunch<'_>,
        format: &PackedFormat,
    ) -> Result<PackedPlan, CudaError> {
        PackedPlan::of(call, format, &self.context.device)
    }

    /// Puts the attention on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// As for [`CudaBackend::attend`], with the plan of the call; `bases` are memory like the rest.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn attend_packed(
        &self,
        call: &AttendLaunch<'_>,
        plan: &PackedPlan,
        bases: Option<&DeviceBases>,
    ) -> Result<(), CudaError> {
        if call.rows == 0 || call.query_heads == 0 {
            return Ok(());
        }
        let page_bytes = plan.format.page_bytes();
        let bases = bases_params(&plan.format, bases, call.kv.cache.len / page_bytes)?;
        let top_r = top_r_params(&plan.format)?;
        let geometry = in_bytes(&call.kv.geometry, page_bytes);
        let call = &AttendLaunch { kv: DeviceKv { geometry, ..call.kv }, ..*call };
        let mut params = with_factors(call, plan.grid)?;
        params.kv.last_page = last_start(page_bytes, call.kv.cache.len);
        let needs = plan.workspace();
        call.floats.expect("floats of workspace", needs.floats)?;
        call.counters.expect("counters of workspace", needs.counters)?;
        for first in (0..call.requests).step_by(plan.requests) {
            let count = plan.requests.min(call.requests - first);
            let params = AttendPackedParams {
                attend: of_requests(call, params, first, count)?,
                page_bytes: narrow("page_tokens", page_bytes)?,
                stage_bytes: narrow("page_tokens", plan.stage_bytes)?,
                workers: narrow("warps", plan.workers)?,
                bases,
                top_r,
            };
            // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise,
            // and the tensors of these requests are parts of the whole ones.
            unsafe { self.launch((plan.source, &plan.kernel), plan.grid, call.stream, &params) }?;
        }
        Ok(())
    }
}

/// The params with what the kernel divides by.
fn with_factors(call: &AttendLaunch<'_>, grid: Grid) -> Result<AttendParams, CudaError> {
    Ok(AttendParams {
        head_factor: factor_of("kv_heads", call.kv.geometry.kv_heads)?,
        chunk_factor: factor_of("query heads", call.group().div_ceil(QUERIES))?,
        block_factor: factor_of("thread blocks", grid.blocks[0] as usize)?,
        ..params_of(call)?
    })
}

#[cfg(test)]
mod tests {
    use kvweave_core::ops::TopR;

    use super::*;

    #[test]
    fn shapes_are_those_of_the_source() {
        let source = include_str!("../../../csrc/packed_pieces.cuh");
        assert!(source.contains(&format!("constexpr int kPackedItems = {MAX_ITEMS};")));
        assert!(source.contains(&format!("constexpr int kStages = {STAGES};")));
        let codes = include_str!("../../../csrc/top_r_codes.cuh");
        let bits = include_str!("../../../csrc/top_r_bits.cuh");
        assert!(bits.contains(&format!("kSelectors = {};", FEWER_SELECTORS / (31 * 4))));
        assert!(codes.contains("kFewerSelectors = (32 - kSelectorColumns) * kSelectors * 4;"));
        assert!(codes.contains("kSelectorColumns = 1;"));
        let (top_r, planes) = (
            include_str!("../../../csrc/attend_top_r.cu"),
            include_str!("../../../csrc/attend_planes.cu"),
        );
        for (shapes, kernels, name) in [
            (&SHAPES, include_str!("../../../csrc/attend_packed.cu"), "KERNELS"),
            (&TOP_R_SHAPES, top_r, "KERNELS"),
            (&CODE_SHAPES, top_r, "CODE_KERNELS"),
            (&PLANES_SHAPES, planes, "KERNELS"),
        ] {
            assert!(shapes.iter().all(|shape| {
                let Shape { head_dim, warps, own_bytes } = shape;
                kernels.contains(&format!("\n{name}({head_dim}, {warps}, {own_bytes})\n"))
            }));
        }
    }

    /// Pages of codes, of which so many are kept of 128 channels.
    fn top_r(kept: usize) -> PackedKind {
        let numbers = KeptNumbers::Int4;
        PackedKind::TopR(TopR { kept, group: 1, channels: 128, numbers })
    }

    #[test]
    fn a_stage_has_room_for_all_that_is_read_of_it() {
        for (kind, page_tokens, head_dim, bytes) in [
            (PackedKind::Int4, 64, 128, 8960),
            (PackedKind::Int4, 16, 128, 4224),
            (PackedKind::Int4, 48, 128, 7168),
            (PackedKind::Int4, 64, 64, 4608),
            (PackedKind::Int4, 16, 64, 2176),
            (PackedKind::Int8, 64, 128, 17152),
            (PackedKind::Int8, 48, 128, 14336),
            (PackedKind::Planes(96), 64, 128, 6272),
            (PackedKind::Planes(96), 48, 128, 6272),
            (PackedKind::Planes(96), 16, 128, 6272),
            (top_r(64), 64, 128, 6400),
            (top_r(64), 48, 128, 5504),
            (top_r(2), 48, 128, 4224),
            (top_r(128), 16, 128, 4224),
        ] {
            let format = PackedFormat::new(kind, ScaleDtype::Bf16, page_tokens, head_dim)
                .expect("sound sizes");
            assert_eq!(stage_bytes(&format), bytes);
            assert!(stage_bytes(&format) >= format.page_bytes());
        }
    }
}
