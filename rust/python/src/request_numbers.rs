//! The numbers that callers have given requests.

use kvweave_core::scheduler::RequestId;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::arguments::{count, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::scalars::Number;

/// The number of a request.
pub fn request_id(number: impl Into<Number>) -> Result<RequestId, Failure> {
    Ok(RequestId(count("request", number)? as u64))
}

/// The numbers of requests: int64 [N], or a list or tuple of ints.
pub enum Requests<'py> {
    Array(Borrowed<'py>),
    List(Vec<Number>),
}

impl<'py> Requests<'py> {
    pub fn of(what: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>() {
            return Ok(Self::List(object.extract()?));
        }
        Ok(Self::Array(borrow(what, object)?))
    }

    pub fn ids(&self, what: &str) -> Result<Vec<RequestId>, Failure> {
        match self {
            Self::List(list) => list.iter().map(request_id).collect(),
            Self::Array(array) => {
                array.tensor.expect_dtype(what, DType::I64)?;
                array.tensor.expect_shape(what, &[("N", None)])?;
                array.tensor.expect_contiguous(what)?;
                // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
                let numbers: &[i64] = unsafe { array.tensor.slice(what) }?;
                numbers.iter().map(|&number| request_id(number)).collect()
            }
        }
    }

    pub fn maybe(what: &str, object: Option<&Bound<'py, PyAny>>) -> PyResult<Vec<RequestId>> {
        let Some(object) = object else { return Ok(Vec::new()) };
        raised(object.py(), Self::of(what, object)?.ids(what))
    }
}
