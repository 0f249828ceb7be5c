//! The ops that write pages or combine results; `attention.rs` has those that read them.
//!
//! Every function follows the same steps: borrow the tensors, check what the params struct cannot,
//! view memory as slices, run with the lock released. Shapes are named as in `kvweave.ops`.

use half::{bf16, f16};
use kvweave_core::ops::{CopyRerotate, CopySource, Fp8E4m3, MergeStates, PageBounds, WritePages};
use kvweave_cpu as cpu;
use kvweave_reference as reference;
use pyo3::prelude::*;

use crate::arguments::{Table, count, head_rows, output, pages_of, raised, scales_of, source_of};
use crate::dlpack::borrow;
use crate::dtype::{DType, ROWS};
use crate::failure::{Failure, call_core};
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::scalars::Number;

/// Runs `$body` with `$T` as the Rust type of a dtype that rows have.
macro_rules! with_element {
    ($py:expr, ($what:expr, $expected:expr), $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::Bf16 => {
                type $T = bf16;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            other => Err(Failure::invalid($what, $expected, other.name()).raise($py)),
        }
    };
}

/// Runs `$body` with `$C` as the Rust type of a cache's dtype.
macro_rules! with_pages {
    ($py:expr, $dtype:expr, $C:ident => $body:expr) => {
        match $dtype {
            DType::Fp8E4m3 => {
                type $C = Fp8E4m3;
                $body
            }
            other => with_element!($py, ("cache", $crate::dtype::PAGES), other, $C => $body),
        }
    };
}

/// Runs `$body` with `$T` and `$C` as the Rust types of rows and of the cache they belong to: the
/// same, or any over fp8.
macro_rules! with_rows {
    ($py:expr, $cache:expr, ($what:expr, $rows:expr), ($T:ident, $C:ident) => $body:expr) => {
        match $cache {
            DType::Fp8E4m3 => with_element!($py, ($what, $crate::dtype::ROWS), $rows, $T => {
                type $C = Fp8E4m3;
                $body
            }),
            other => with_element!($py, ("cache", $crate::dtype::PAGES), other, $T => {
                type $C = $T;
                $body
            }),
        }
    };
}

/// A function of the fast crate, or of the definition when `$reference`.
macro_rules! run {
    ($py:expr, $reference:expr, $op:ident, $params:expr) => {{
        let params = $params;
        call_core($py, move || if $reference { reference::$op(params) } else { cpu::$op(params) })
    }};
}

pub(crate) use {run, with_element, with_rows};

/// Bounds of pages [pages, 3, D] to bring up to date, and the table of those that are.
pub type BoundsArguments<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "each is named in Python")]
#[pyo3(signature = (cache, layer, k, v, slots, reach, bounds, kv_scales, reference))]
pub fn write_pages(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    layer: Number,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    slots: &Bound<'_, PyAny>,
    reach: Option<&Bound<'_, Reach>>,
    bounds: Option<BoundsArguments<'_>>,
    kv_scales: Option<(f32, f32)>,
    reference: bool,
) -> PyResult<()> {
    let owner = borrow("cache", cache)?;
    let cache = owner.tensor;
    let (k, v) = (borrow("k", k)?, borrow("v", v)?);
    let slots = Table::of("slots", slots)?;
    let reach = reach.map(|reach| reach.get().core());
    let bounds = bounds
        .map(|(values, held)| {
            Ok::<_, PyErr>((borrow("bounds", &values)?, Table::of("held", &held)?))
        })
        .transpose()?;
    with_rows!(py, cache.dtype, ("k", k.tensor.dtype), (T, C) => {
        let params = || {
            let (k, v) = (&k.tensor, &v.tensor);
            let layer = count("layer", layer)?;
            let keys = head_rows::<T>("k", k)?;
            let values = head_rows::<T>("v", v)?;
            let geometry = pages_of(&cache, layer.saturating_add(1), keys.heads)?;
            cache.expect_apart("cache", k, "k")?;
            cache.expect_apart("cache", v, "v")?;
            cache.expect_apart("cache", &slots.0.tensor, "slots")?;
            let mut read = vec![("cache", &cache), ("k", k), ("v", v), ("slots", &slots.0.tensor)];
            let bounds = match &bounds {
                Some((values, held)) => {
                    read.push(("held", &held.0.tensor));
                    let shape = [("pages", None), ("3", Some(3)), ("D", Some(geometry.head_dim))];
                    let values = output("bounds", &values.tensor, &shape, &read)?;
                    cache.expect_apart("cache", &held.0.tensor, "held")?;
                    Some(PageBounds { values, held: held.rows("held")? })
                }
                None => None,
            };
            let slots = slots.slots("slots", reach)?;
            // SAFETY: no other argument overlaps it; others are excluded as `arguments` says.
            let cache = unsafe { cache.slice_mut::<C>("cache") }?;
            let scales = scales_of(kv_scales);
            Ok(WritePages { cache, geometry, layer, scales, keys, values, slots, reach, bounds })
        };
        run!(py, reference, write_pages, raised(py, params())?)
    })
}

#[pyfunction]
#[pyo3(signature = (cache, source, copies, rope, kv_heads, layers, reference))]
#[expect(clippy::too_many_arguments, reason = "the arguments of one op")]
pub fn copy_rerotate(
    py: Python<'_>,
    cache: &Bound<'_, PyAny>,
    source: Option<&Bound<'_, PyAny>>,
    copies: &Bound<'_, PyAny>,
    rope: &Bound<'_, RopeTable>,
    kv_heads: Number,
    layers: Option<&Bound<'_, PyAny>>,
    reference: bool,
) -> PyResult<()> {
    let owner = borrow("cache", cache)?;
    let cache = owner.tensor;
    let source = source.map(|source| borrow("source", source)).transpose()?;
    let copies = Table::of("copies", copies)?;
    let layers = layers.map(|layers| Table::of("layers", layers)).transpose()?;
    let rope = &rope.get().table;
    with_pages!(py, cache.dtype, C => {
        let params = || {
            let geometry = pages_of(&cache, rope.layers(), count("kv_heads", kv_heads)?)?;
            cache.expect_apart("cache", &copies.0.tensor, "copies")?;
            let copies = copies.rows("copies")?;
            if let Some(layers) = &layers {
                cache.expect_apart("cache", &layers.0.tensor, "layers")?;
            }
            let layers = layers.as_ref().map(|layers| layers.list("layers")).transpose()?;
            let mut read = None;
            if let Some(source) = &source {
                let of_source = source_of(&source.tensor, &cache, &geometry)?;
                // SAFETY: it is apart from the cache; others are excluded as `arguments` says.
                let pages = unsafe { source.tensor.slice::<C>("source") }?;
                read = Some(CopySource { pages, geometry: of_source });
            }
            // SAFETY: no other argument overlaps it; others are excluded as `arguments` says.
            let cache = unsafe { cache.slice_mut::<C>("cache") }?;
            Ok(CopyRerotate { cache, geometry, source: read, copies, rope, layers })
        };
        run!(py, reference, copy_rerotate, raised(py, params())?)
    })
}

#[pyfunction]
#[pyo3(signature = (outs, lses, out, lse, reference))]
pub fn merge_states(
    py: Python<'_>,
    outs: &Bound<'_, PyAny>,
    lses: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    reference: bool,
) -> PyResult<()> {
    let (outs, lses) = (borrow("outs", outs)?, borrow("lses", lses)?);
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    let (outs, lses, out, lse) = (outs.tensor, lses.tensor, out.tensor, lse.tensor);
    with_element!(py, ("outs", ROWS), outs.dtype, T => {
        let params = || {
            outs.expect_shape("outs", &[("S", None), ("R", None), ("H", None), ("D", None)])?;
            let size = |axis: usize| outs.shape()[axis];
            let (splits, states, head_dim) = (size(0), size(1).saturating_mul(size(2)), size(3));
            let [s, r, h, d] = [("S", 0), ("R", 1), ("H", 2), ("D", 3)]
                .map(|(name, axis)| (name, Some(size(axis))));
            lses.expect_shape("lses", &[s, r, h])?;
            outs.expect_contiguous("outs")?;
            lses.expect_contiguous("lses")?;
            let read = [("outs", &outs), ("lses", &lses), ("lse", &lse)];
            let out = output::<T>("out", &out, &[r, h, d], &read)?;
            let lse = output("lse", &lse, &[r, h], &read[..2])?;
            // SAFETY: outputs are apart from both; others are excluded as `arguments` says.
            let (outs, lses) = unsafe { (outs.slice::<T>("outs")?, lses.slice("lses")?) };
            Ok(MergeStates { outs, lses, splits, states, head_dim, out, lse })
        };
        run!(py, reference, merge_states, raised(py, params())?)
    })
}
