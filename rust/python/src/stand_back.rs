//! Threads of Python whose native work is to keep out of the way of others.

use pyo3::prelude::*;

use crate::arguments::raised;
use crate::background::keep_half_free;
use crate::failure::Failure;

/// Has native calls of this thread be worked on by half of the processors, at low priority, from
/// now on and for as long as it lives: other threads find the other half free.
///
/// # Errors
/// `InvalidArgument` where the system has no more threads; nothing has changed then.
#[pyfunction]
pub fn stand_back(py: Python<'_>) -> PyResult<()> {
    let made = py.detach(keep_half_free);
    raised(py, made.map_err(|error| Failure::invalid("threads", "more of them", error)))
}
