//! Tables of a few columns as Python gets them.

use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

/// A table of `COLUMNS` columns as numpy int32; the rows are not copied.
pub type Rows<'py> = Bound<'py, PyArray2<i32>>;

pub fn rows<const COLUMNS: usize>(py: Python<'_>, rows: Vec<[i32; COLUMNS]>) -> PyResult<Rows<'_>> {
    let count = rows.len();
    PyArray1::from_vec(py, rows.into_flattened()).reshape([count, COLUMNS])
}
