//! `step_tables` on the host.

use kvweave_core::ops::StepTables;
use kvweave_reference as reference;
use pyo3::prelude::*;

use crate::arguments::raised;
use crate::failure::call_core;
use crate::ops::step_batch::{
    BatchArguments, Borrows, Results, Sizes, SpanArguments, block_stride,
};

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (batch, out, sizes, spans))]
pub fn step_tables(
    py: Python<'_>,
    batch: BatchArguments<'_>,
    out: Results<'_>,
    sizes: Sizes,
    spans: Vec<SpanArguments>,
) -> PyResult<()> {
    let given = Borrows::of(py, &batch, &out, sizes, &spans)?;
    let params = || {
        let shape = given.shape()?;
        let places = given.places.as_ref();
        // SAFETY: what is written lies apart from all else, as `shape` checked; others are excluded
        // as `arguments` says, and `given` holds every owner.
        unsafe {
            Ok(StepTables {
                shape,
                blocks: given.blocks.tensor.slice("blocks")?,
                block_stride: block_stride(&given.blocks.tensor),
                lengths: given.lengths.tensor.slice("lengths")?,
                query_start: given.query_start.tensor.slice("query_start")?,
                slot_mapping: given.slot_mapping.tensor.slice("slot_mapping")?,
                places: places.map(|places| places.tensor.slice("places")).transpose()?,
                positions: given.positions.tensor.slice_mut("positions")?,
                slots: given.slots.tensor.slice_mut("slots")?.as_chunks_mut().0,
                entries: given.entries.tensor.slice_mut("entries")?.as_chunks_mut().0,
                offsets: given.offsets.tensor.slice_mut("offsets")?,
            })
        }
    };
    let params = raised(py, params())?;
    call_core(py, move || reference::step_tables(params))
}
