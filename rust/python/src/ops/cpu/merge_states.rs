//! `merge_states` on the host.

use kvweave_core::ops::MergeStates;
use pyo3::prelude::*;

use super::element::{run, with_element};
use crate::arguments::{output, raised};
use crate::dlpack::borrow;
use crate::dtype::ROWS;

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
