//! Token ids of any integer array as the u32 that the core speaks.

use std::borrow::Cow;

use pyo3::prelude::*;

use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;

/// A 1-D array of int32, int64 or uint32 token ids, borrowed.
pub struct Tokens<'py>(Borrowed<'py>);

impl<'py> Tokens<'py> {
    pub fn of(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(Self(borrow("tokens", object)?))
    }

    /// The ids; copied only where their type or strides demand it.
    pub fn ids(&self) -> Result<Cow<'_, [u32]>, Failure> {
        let tensor = &self.0.tensor;
        tensor.expect_shape("tokens", &[("T", None)])?;
        tensor.expect_contiguous("tokens")?;
        match tensor.dtype {
            // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
            DType::U32 => Ok(Cow::Borrowed(unsafe { tensor.slice("tokens") }?)),
            DType::I32 => {
                // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
                let ids: &[i32] = unsafe { tensor.slice("tokens") }?;
                refuse_negative(ids.iter().fold(0, |all, &id| all.min(id)).into())?;
                Ok(Cow::Borrowed(unsigned(ids)))
            }
            DType::I64 => {
                // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
                let ids: &[i64] = unsafe { tensor.slice("tokens") }?;
                let narrow = |&id: &i64| {
                    u32::try_from(id).map_err(|_| Failure::invalid("tokens", RANGE, id))
                };
                ids.iter().map(narrow).collect::<Result<Vec<u32>, _>>().map(Cow::Owned)
            }
            other => {
                let expected = "int32, int64 or uint32";
                Err(Failure::invalid("tokens", expected, other.name()))
            }
        }
    }
}

const RANGE: &str = "ids from 0 to 2^32 − 1";

fn refuse_negative(lowest: i64) -> Result<(), Failure> {
    if lowest >= 0 { Ok(()) } else { Err(Failure::invalid("tokens", RANGE, lowest)) }
}

/// The same numbers under the type of the same width; none of them is negative.
fn unsigned(ids: &[i32]) -> &[u32] {
    // SAFETY: same size, alignment and validity: every bit pattern is a u32.
    unsafe { std::slice::from_raw_parts(ids.as_ptr().cast(), ids.len()) }
}
