//! Numbers and texts as Python has them: of any size, of any characters.

use pyo3::Borrowed;
use pyo3::exceptions::{PyOverflowError, PyUnicodeEncodeError};
use pyo3::prelude::*;

use crate::failure::Failure;

/// An int. One that 64 bits do not hold counts as the outermost that they do: it is outside
/// whatever bounds the argument has, which says so by name.
#[derive(Clone, Copy)]
pub struct Number(i64);

impl FromPyObject<'_, '_> for Number {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok(number) => Ok(Self(number)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            Err(error) => Err(error),
        }
    }
}

impl From<Number> for i64 {
    fn from(number: Number) -> i64 {
        number.0
    }
}

impl From<i32> for Number {
    fn from(number: i32) -> Number {
        Number(number.into())
    }
}

impl From<i64> for Number {
    fn from(number: i64) -> Number {
        Number(number)
    }
}

/// The fingerprint of RoPE parameters: an int from 0 to 2^64 − 1.
#[derive(Clone, Copy, Default)]
pub struct Regime(pub u64);

impl FromPyObject<'_, '_> for Regime {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        object.extract().map(Self).map_err(|error| {
            if !error.is_instance_of::<PyOverflowError>(object.py()) {
                return error;
            }
            let got = object.repr().map_or_else(|_| "another".into(), |text| text.to_string());
            Failure::invalid("regime", "a number from 0 to 2^64 − 1", got).raise(object.py())
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
            let got = object.repr().map_or_else(|_| "others".into(), |text| text.to_string());
            Failure::invalid("text", "characters that UTF-8 can hold", got).raise(object.py())
        })
    }
}
