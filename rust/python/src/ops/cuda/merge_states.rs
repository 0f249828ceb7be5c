//! `merge_states` on CUDA.

use kvweave_cuda::MergeStatesLaunch;
use pyo3::prelude::*;

use super::arguments::{Place, extent_of, row_dtype};
use super::device::backend;
use crate::arguments::raised;
use crate::dlpack::borrow;
use crate::dtype::DType;
use crate::failure::{Failure, call_core};

/// `stream` is the handle of the stream to run on.
#[pyfunction]
#[pyo3(signature = (outs, lses, out, lse, stream))]
pub fn merge_states_cuda(
    py: Python<'_>,
    outs: &Bound<'_, PyAny>,
    lses: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    stream: u64,
) -> PyResult<()> {
    let (outs, lses) = (borrow("outs", outs)?, borrow("lses", lses)?);
    let (out, lse) = (borrow("out", out)?, borrow("lse", lse)?);
    let (outs, lses, out, lse) = (&outs.tensor, &lses.tensor, &out.tensor, &lse.tensor);
    let checks = || {
        let dtype = row_dtype("outs", outs)?;
        let place = Place::of("outs", outs)?;
        outs.expect_shape("outs", &[("S", None), ("R", None), ("H", None), ("D", None)])?;
        let size = |axis: usize| outs.shape()[axis];
        let [s, r, h, d] =
            [("S", 0), ("R", 1), ("H", 2), ("D", 3)].map(|(name, axis)| (name, Some(size(axis))));
        outs.expect_contiguous("outs")?;
        place.expect("lses", lses, DType::F32)?;
        lses.expect_shape("lses", &[s, r, h])?;
        lses.expect_contiguous("lses")?;
        for (what, count) in [("splits", size(0)), ("head_dim", size(3))] {
            if count == 0 {
                return Err(Failure::invalid(what, "at least 1", count));
            }
        }
        let read = [("outs", outs), ("lses", lses), ("lse", lse)];
        let launch = MergeStatesLaunch {
            outs: extent_of("outs", outs)?,
            lses: extent_of("lses", lses)?,
            dtype,
            splits: size(0),
            states: size(1).saturating_mul(size(2)),
            head_dim: size(3),
            out: place.output("out", out, (dtype.into(), &[r, h, d]), &read)?,
            lse: place.output("lse", lse, (DType::F32, &[r, h]), &read[..2])?,
            stream,
        };
        Ok((place, launch))
    };
    let (place, launch) = raised(py, checks())?;
    call_core(py, || {
        // SAFETY: every tensor was read from a live owner on this device, which torch keeps until
        // the stream has passed.
        unsafe { backend(place.ordinal)?.merge_states(&launch) }.map_err(Failure::from)
    })
}
