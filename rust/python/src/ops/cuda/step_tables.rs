//! `step_tables` on CUDA.

use kvweave_cuda::StepTablesLaunch;
use pyo3::prelude::*;

use super::arguments::{extent_of, ordinal_of};
use super::device::backend;
use crate::arguments::raised;
use crate::failure::{Failure, call_core};
use crate::ops::step_batch::{
    BatchArguments, Borrows, Results, Sizes, SpanArguments, block_stride,
};

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (batch, out, sizes, spans, stream))]
pub fn step_tables_cuda(
    py: Python<'_>,
    batch: BatchArguments<'_>,
    out: Results<'_>,
    sizes: Sizes,
    spans: Vec<SpanArguments>,
    stream: u64,
) -> PyResult<()> {
    let given = Borrows::of(py, &batch, &out, sizes, &spans)?;
    let launch = || {
        let shape = given.shape()?;
        let places = given.places.as_ref();
        let launch = StepTablesLaunch {
            shape,
            blocks: extent_of("blocks", &given.blocks.tensor)?,
            block_stride: block_stride(&given.blocks.tensor),
            lengths: extent_of("lengths", &given.lengths.tensor)?,
            query_start: extent_of("query_start", &given.query_start.tensor)?,
            slot_mapping: extent_of("slot_mapping", &given.slot_mapping.tensor)?,
            places: places.map(|places| extent_of("places", &places.tensor)).transpose()?,
            positions: extent_of("positions", &given.positions.tensor)?,
            slots: extent_of("slots", &given.slots.tensor)?,
            entries: extent_of("entries", &given.entries.tensor)?,
            offsets: extent_of("offsets", &given.offsets.tensor)?,
            stream,
        };
        Ok((ordinal_of("blocks", &given.blocks.tensor)?, launch))
    };
    let (ordinal, launch) = raised(py, launch())?;
    call_core(py, move || {
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed.
        unsafe { backend(ordinal)?.step_tables(&launch) }.map_err(Failure::from)
    })
}
