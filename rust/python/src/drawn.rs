//! Pictures of native objects in a notebook: Python draws them, in `kvweave.drawn`.

use pyo3::prelude::*;

/// What a function of `kvweave.drawn` makes of an object: HTML.
pub fn drawn<'py>(what: &Bound<'py, PyAny>, how: &str) -> PyResult<Bound<'py, PyAny>> {
    what.py().import("kvweave.drawn")?.call_method1(how, (what,))
}
