//! `score_tokens` on the host.

use kvweave_core::ops::{EdgeMass, ScoreTokens};
use pyo3::prelude::*;

use super::element::{run, with_rows};
use super::reading::{Attention, Offsets};
use crate::arguments::{output, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::failure::Failure;
use crate::ops::reading::{AttentionArguments, EdgeArguments, keys};
use crate::tensor::TensorRef;

/// `edge` is written when it is given.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (arguments, entry_offsets, mass, edge, reference))]
pub fn score_tokens(
    py: Python<'_>,
    arguments: AttentionArguments<'_>,
    entry_offsets: Option<&Bound<'_, PyAny>>,
    mass: &Bound<'_, PyAny>,
    edge: Option<EdgeArguments<'_>>,
    reference: bool,
) -> PyResult<()> {
    let call = Attention::of(py, &arguments)?;
    let entry_offsets = Offsets::of("entry_offsets", entry_offsets, &call.entries)?;
    let mass = borrow("mass", mass)?;
    let edge = edge.map(|edge| Edge::of(py, &edge)).transpose()?;
    with_rows!(py, call.cache.tensor.dtype, ("q", call.q.tensor.dtype), (T, C) => {
        let params = || {
            let (queries, kv) = (call.queries::<T>()?, call.kv::<C>()?);
            let mut read = call.read().to_vec();
            let values = output("mass", &mass.tensor, &[("T", None)], &read)?;
            read.push(("mass", &mass.tensor));
            let rows = &queries.vectors;
            let shape = [("R", Some(rows.rows)), ("H", Some(rows.heads))];
            let edge = edge.as_ref().map(|edge| edge.params(&shape, &read)).transpose()?;
            let entry_offsets = entry_offsets.list("entry_offsets")?;
            let (scoring, mass) = (call.scoring, values);
            Ok(ScoreTokens { queries, kv, scoring, entry_offsets, mass, edge })
        };
        run!(py, reference, score_tokens, raised(py, params())?)
    })
}

/// What is written of the edge, borrowed.
struct Edge<'py> {
    share: Borrowed<'py>,
    window: u32,
    sink: u32,
}

impl<'py> Edge<'py> {
    fn of(py: Python<'py>, (share, window, sink): &EdgeArguments<'py>) -> PyResult<Self> {
        let window = raised(py, keys("window of edge", window))?;
        let sink = raised(py, keys("sink of edge", sink))?;
        Ok(Self { share: borrow("edge", share)?, window, sink })
    }

    fn params<'a>(
        &self,
        shape: &[(&str, Option<usize>)],
        read: &[(&str, &TensorRef)],
    ) -> Result<EdgeMass<'a>, Failure> {
        let share = output("edge", &self.share.tensor, shape, read)?;
        Ok(EdgeMass { window: self.window, sink: self.sink, share })
    }
}
