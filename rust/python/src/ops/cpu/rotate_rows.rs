//! `rotate_rows` on the host.

use kvweave_core::ops::{HeadRowsMut, RotateRows};
use pyo3::prelude::*;

use super::element::{run, with_element};
use crate::arguments::{head_rows, raised, rows_of};
use crate::dtype::ROWS;
use crate::failure::Failure;
use crate::ops::rotation::{Part, Rotation, Vectors, turn_rows};
use crate::tensor::TensorRef;

#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (vectors, turns, pairing, out, reference))]
pub fn rotate_rows(
    py: Python<'_>,
    vectors: Vectors<'_>,
    turns: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    pairing: &str,
    out: Option<Vectors<'_>>,
    reference: bool,
) -> PyResult<()> {
    let rotation = Rotation::of(&vectors, &turns, pairing, out.as_ref())?;
    with_element!(py, ("q", ROWS), rotation.q().dtype, T => {
        let params = |part: &Part<'_>| {
            let turn = |(what, tensor): (&'static str, &TensorRef)| {
                // SAFETY: apart from all that is written; others are excluded as `arguments` says.
                turn_rows(what, tensor, unsafe { tensor.slice::<T>(what) }?)
            };
            let [cos, sin] = rotation.turns();
            let source = part.source.map(|(what, tensor)| head_rows::<T>(what, tensor));
            let shape = rows_of::<()>(part.name, part.target, &[])?;
            // SAFETY: apart from all that is read, as `parts` has checked, and given up before the
            // next of them is made; others are excluded as `arguments` says.
            let values = unsafe { part.target.slice_mut::<T>(part.name) }?;
            let vectors = HeadRowsMut {
                values,
                rows: shape.rows,
                heads: shape.heads,
                head_dim: shape.head_dim,
                row_stride: shape.row_stride,
                head_stride: shape.head_stride,
            };
            Ok::<_, Failure>(RotateRows {
                name: part.name,
                vectors,
                source: source.transpose()?,
                cos: turn(cos)?,
                sin: turn(sin)?,
                pairing: rotation.pairing,
            })
        };
        // Keys that are refused leave queries as they were.
        let parts = raised(py, rotation.parts())?;
        for part in &parts {
            raised(py, params(part).and_then(|params| params.validate().map_err(Failure::from)))?;
        }
        for part in &parts {
            run!(py, reference, rotate_rows, raised(py, params(part))?)?;
        }
        Ok(())
    })
}
