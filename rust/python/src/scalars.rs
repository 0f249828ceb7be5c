//! Numbers and texts as Python has them: of any size, of any characters.

use pyo3::Borrowed;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyUnicodeEncodeError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::failure::Failure;

/// An argument that is to be an int, which is asked for by name: what came instead is told by it.
#[derive(Clone)]
pub enum Number {
    /// One that 64 bits do not hold counts as the outermost that they do: it is outside whatever
    /// bounds the argument has, which says so by name.
    Whole(i64),
    /// What came instead of one, in Python's words. A bool is none.
    Other(String),
}

impl Number {
    /// The int of the argument that is called `what`.
    ///
    /// # Errors
    /// `InvalidArgument` for anything else.
    pub fn whole(self, what: &str) -> Result<i64, Failure> {
        match self {
            Self::Whole(number) => Ok(number),
            Self::Other(got) => Err(Failure::invalid(what, "a whole number", got)),
        }
    }
}

impl FromPyObject<'_, '_> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyBool>() {
            return Ok(Self::Other(shown(object)));
        }
        match object.extract() {
            Ok(number) => Ok(Self::Whole(number)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self::Whole(if object.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
                Ok(Self::Other(shown(object)))
            }
            Err(error) => Err(error),
        }
    }
}

impl From<&Number> for Number {
    fn from(number: &Number) -> Number {
        number.clone()
    }
}

impl From<i32> for Number {
    fn from(number: i32) -> Number {
        Number::Whole(number.into())
    }
}

impl From<i64> for Number {
    fn from(number: i64) -> Number {
        Number::Whole(number)
    }
}

/// The fingerprint of RoPE parameters: an int from 0 to 2^64 − 1.
#[derive(Clone, Copy, Default)]
pub struct Regime(pub u64);

impl FromPyObject<'_, '_> for Regime {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let known = match object.is_instance_of::<PyBool>() {
            true => None,
            false => object.extract().ok(),
        };
        known.map(Self).ok_or_else(|| {
            let expected = "a number from 0 to 2^64 − 1";
            Failure::invalid("regime", expected, shown(object)).raise(object.py())
        })
    }
}

/// A str whose characters UTF-8 can hold: no half of one.
#[derive(Clone, Copy, Default)]
pub struct Text<'a>(pub &'a str);

impl<'a> FromPyObject<'a, '_> for Text<'a> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, '_, PyAny>) -> PyResult<Self> {
        object.extract().map(Self).map_err(|error| {
            if !error.is_instance_of::<PyUnicodeEncodeError>(object.py()) {
                return error;
            }
            let expected = "characters that UTF-8 can hold";
            Failure::invalid("text", expected, shown(object)).raise(object.py())
        })
    }
}

/// What came, as Python shows it.
fn shown(object: Borrowed<'_, '_, PyAny>) -> String {
    object.repr().map_or_else(|_| "another".into(), |text| text.to_string())
}
