//! `copy_rerotate` on the host.

use kvweave_core::ops::{CopyRerotate, CopySource};
use pyo3::prelude::*;

use super::element::{run, with_pages};
use crate::arguments::{Table, count, pages_of, raised, source_of};
use crate::dlpack::borrow;
use crate::rope::RopeTable;
use crate::scalars::Number;

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
