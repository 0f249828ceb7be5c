//! Why there is no device, and what a driver call said.

use std::fmt::Display;

use thiserror::Error;

/// CUDA cannot be used here; the text says why.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Unavailable(pub(crate) String);

/// A launch that was refused before or by the driver.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// An argument the kernel cannot work with.
    #[error("{what}: expected {expected}, got {got}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What came.
        got: String,
    },
    /// Something that no kernel here does, or that this device cannot.
    #[error("{what}: expected {expected}, got {got}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// What there is.
        expected: String,
        /// What came.
        got: String,
    },
    /// A driver call found no memory on the device.
    #[error("{call}: expected memory for it, got {got}")]
    OutOfMemory {
        /// The driver function.
        call: &'static str,
        /// Name and text of the driver's error.
        got: String,
    },
    /// A driver call returned an error.
    #[error("{call}: expected success, got {got}")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Name and text of the driver's error.
        got: String,
    },
}

impl CudaError {
    pub(crate) fn invalid(
        what: &'static str,
        expected: impl Display,
        got: impl Display,
    ) -> CudaError {
        CudaError::InvalidArgument { what, expected: expected.to_string(), got: got.to_string() }
    }
    pub(crate) fn unsupported(
        what: &'static str,
        expected: impl Display,
        got: impl Display,
    ) -> CudaError {
        CudaError::Unsupported { what, expected: expected.to_string(), got: got.to_string() }
    }
}
