//! `rotate_rows` on CUDA.

use kvweave_core::ops::validate_turns;
use kvweave_cuda::{DeviceRows, RotateRowsLaunch, RotatedVectors};
use pyo3::prelude::*;

use super::arguments::{Place, extent_of, nothing, row_dtype};
use super::device::backend;
use crate::arguments::raised;
use crate::failure::{Failure, call_core};
use crate::ops::rotation::{Part, Rotation, Vectors, turn_rows};
use crate::tensor::TensorRef;

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
#[pyo3(signature = (vectors, turns, pairing, out, stream))]
pub fn rotate_rows_cuda(
    py: Python<'_>,
    vectors: Vectors<'_>,
    turns: (Bound<'_, PyAny>, Bound<'_, PyAny>),
    pairing: &str,
    out: Option<Vectors<'_>>,
    stream: u64,
) -> PyResult<()> {
    let rotation = Rotation::of(&vectors, &turns, pairing, out.as_ref())?;
    let checks = || {
        let dtype = row_dtype("q", rotation.q())?;
        let place = Place::of("q", rotation.q())?;
        let turn = |(what, tensor): (&'static str, &TensorRef)| {
            place.expect(what, tensor, dtype.into())?;
            let rows = turn_rows(what, tensor, nothing(tensor.extent(what)?))?;
            let (row_stride, head_stride) = (rows.row_stride, rows.head_stride);
            let tensor = extent_of(what, tensor)?;
            Ok::<_, Failure>((DeviceRows { tensor, row_stride, head_stride }, rows))
        };
        let [cos, sin] = rotation.turns();
        let ((cos, cos_rows), (sin, sin_rows)) = (turn(cos)?, turn(sin)?);
        let rotated = |part: &Part<'_>| {
            let (target, written) = place.rows(part.name, part.target)?;
            let read = part.source.map(|(what, tensor)| place.rows(what, tensor)).transpose()?;
            let source = read.as_ref().map(|(_, rows)| ("source", rows));
            let turns = [("cos", &cos_rows), ("sin", &sin_rows)];
            validate_turns((part.name, &written), source, turns)?;
            let source = read.map(|(tensor, _)| tensor);
            Ok::<_, Failure>((RotatedVectors { target, source, heads: written.heads }, written))
        };
        let parts = rotation.parts()?;
        let (q, rows) = rotated(&parts[0])?;
        let keys = parts.get(1).map(rotated).transpose()?;
        let launch = RotateRowsLaunch {
            q,
            k: keys.map(|(vectors, _)| vectors),
            dtype,
            rows: rows.rows,
            head_dim: rows.head_dim,
            cos,
            sin,
            rotary_dim: cos_rows.head_dim,
            pairing: rotation.pairing,
            stream,
        };
        Ok((place, launch))
    };
    let (place, launch) = raised(py, checks())?;
    call_core(py, || {
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed. What is written is apart from all else, and no vector of it shares
        // an element with another, as was checked.
        unsafe { backend(place.ordinal)?.rotate_rows(&launch) }.map_err(Failure::from)
    })
}
