//! Errors of every crate become one Python exception class each: the only place that maps them.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvweave_core::ops::{OpError, OpErrorKind};
use kvweave_core::{Error, ErrorKind, StepRefused};
use kvweave_store::{ErrorKind as StoreErrorKind, StoreError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

use crate::background::in_place;

/// A refusal on its way to Python: the class of `kvweave.errors`, and the three parts of its text.
#[derive(Debug)]
pub struct Failure {
    class: &'static str,
    what: String,
    expected: String,
    got: String,
    /// Of a batch, the one that it is about.
    request: Option<usize>,
}

impl Failure {
    fn new(
        class: &'static str,
        what: impl Into<String>,
        expected: impl Display,
        got: impl Display,
    ) -> Self {
        let (what, expected, got) = (brief(what.into()), expected.to_string(), brief(got));
        Self { class, what, expected, got, request: None }
    }

    pub fn invalid(what: impl Into<String>, expected: impl Display, got: impl Display) -> Self {
        Self::new("InvalidArgument", what, expected, got)
    }

    pub fn unsupported(what: impl Into<String>, expected: impl Display, got: impl Display) -> Self {
        Self::new("Unsupported", what, expected, got)
    }

    pub fn unavailable(what: impl Into<String>, expected: impl Display, got: impl Display) -> Self {
        Self::new("DeviceUnavailable", what, expected, got)
    }

    pub fn out_of_memory(
        what: impl Into<String>,
        expected: impl Display,
        got: impl Display,
    ) -> Self {
        Self::new("OutOfMemory", what, expected, got)
    }

    /// The exception; an import error instead when `kvweave.errors` cannot be had.
    pub fn raise(self, py: Python<'_>) -> PyErr {
        self.build(py).unwrap_or_else(|error| error)
    }

    fn build(self, py: Python<'_>) -> PyResult<PyErr> {
        static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
        let module = ERRORS
            .get_or_try_init(py, || PyModule::import(py, "kvweave.errors").map(Bound::unbind))?;
        let parts = PyDict::new(py);
        parts.set_item("expected", &self.expected)?;
        parts.set_item("got", &self.got)?;
        let text = format!("{}: expected {}, got {}", self.what, self.expected, self.got);
        let raised = module.bind(py).getattr(self.class)?.call((text,), Some(&parts))?;
        if self.request.is_some() {
            raised.setattr("request", self.request)?;
        }
        Ok(PyErr::from_value(raised))
    }
}

/// What came, in as many characters as help: it may be a file of megabytes.
fn brief(got: impl Display) -> String {
    const SHOWN: usize = 300;
    let text = got.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text,
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let class = match error.kind() {
            ErrorKind::InvalidArgument | ErrorKind::OutOfRange | ErrorKind::NotWritable => {
                "InvalidArgument"
            }
            ErrorKind::PoolFull { .. } => "PoolFull",
            ErrorKind::QuotaExceeded { .. } => "QuotaExceeded",
            ErrorKind::OutOfMemory => "OutOfMemory",
            ErrorKind::UnknownSegment => "UnknownSegment",
            ErrorKind::NamespaceConflict => "NamespaceConflict",
            ErrorKind::CorruptHeadMap => "CorruptHeadMap",
            _ => "KvweaveError",
        };
        Self::new(class, error.what(), error.expected(), error.got())
    }
}

impl From<StepRefused> for Failure {
    fn from(refused: StepRefused) -> Self {
        Self { request: refused.request, ..refused.error.into() }
    }
}

impl From<OpError> for Failure {
    fn from(error: OpError) -> Self {
        let class = match error.kind() {
            OpErrorKind::Shape
            | OpErrorKind::OutOfRange
            | OpErrorKind::Overlap
            | OpErrorKind::InvalidArgument => "InvalidArgument",
            OpErrorKind::Unsupported => "Unsupported",
            _ => "KvweaveError",
        };
        Self::new(class, error.what(), error.expected(), error.got())
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let class = match error.kind() {
            StoreErrorKind::InvalidArgument => "InvalidArgument",
            StoreErrorKind::Truncated | StoreErrorKind::Corrupt => "CorruptShard",
            StoreErrorKind::OtherSchema | StoreErrorKind::Foreign => "ForeignShard",
            StoreErrorKind::OtherModel => "ForeignStore",
            StoreErrorKind::Unknown => "UnknownShard",
            StoreErrorKind::QuotaExceeded { .. } => "QuotaExceeded",
            StoreErrorKind::Full { .. } | StoreErrorKind::DiskFull => "StoreFull",
            StoreErrorKind::Io => "StoreUnavailable",
            _ => "KvweaveError",
        };
        Self::new(class, error.what(), error.expected(), error.got())
    }
}

/// Every call into the crates: the GIL released, a panic turned into an exception.
///
/// # Errors
/// The mapped failure, or `KvweaveError` for a panic, which is a defect of kvweave.
pub fn call_core<T: Send, E: Into<Failure>>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    let outcome = py.detach(|| {
        catch_unwind(AssertUnwindSafe(|| in_place(|| work().map_err(Into::into))))
            .unwrap_or_else(|panic| Err(defect(&*panic)))
    });
    outcome.map_err(|failure| failure.raise(py))
}

fn defect(panic: &(dyn Any + Send)) -> Failure {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_string())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    Failure::new("KvweaveError", "internal", "no panic", text)
}
