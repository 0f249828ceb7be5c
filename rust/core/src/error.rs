//! The one error of the crate: what was looked at, what was expected, what came.

use std::fmt;

/// Why a call was refused. Nothing has changed when an error is returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    what: String,
    expected: String,
    got: String,
}

/// The kinds of error, for callers that react to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument that can never be right.
    InvalidArgument,
    /// Not enough blocks, even with every cached block evicted.
    PoolFull {
        /// Blocks that the call needed, of the group that ran out.
        needed: usize,
        /// Blocks that could have been had.
        free: usize,
    },
    /// Not enough blocks in the quota of a namespace.
    QuotaExceeded {
        /// Blocks that the call would have pinned.
        needed: usize,
        /// Blocks that the quota had left.
        free: usize,
    },
    /// A host without the memory that the books of a cache need.
    OutOfMemory,
    /// A frozen segment that does not exist.
    UnknownSegment,
    /// One token span claimed by two namespaces.
    NamespaceConflict,
    /// A head map that is not what it says it is.
    CorruptHeadMap,
    /// A position or count outside the request.
    OutOfRange,
    /// A position whose KV others may read.
    NotWritable,
    /// The books do not balance: a defect of this crate.
    Inconsistent,
}

impl Error {
    /// An error from its parts; the text reads `what: expected …, got …`.
    pub fn new(
        kind: ErrorKind,
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> Error {
        Error { kind, what: what.into(), expected: expected.into(), got: got.to_string() }
    }

    pub(crate) fn invalid(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> Error {
        Error::new(ErrorKind::InvalidArgument, what, expected, got)
    }

    pub(crate) fn out_of_range(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> Error {
        Error::new(ErrorKind::OutOfRange, what, expected, got)
    }

    pub(crate) fn inconsistent(
        what: impl Into<String>,
        expected: impl fmt::Display,
        got: impl fmt::Display,
    ) -> Error {
        Error::new(ErrorKind::Inconsistent, what, expected.to_string(), got)
    }

    pub(crate) fn pool_full(what: &str, needed: usize, free: usize) -> Error {
        let kind = ErrorKind::PoolFull { needed, free };
        Error::new(kind, what, format!("{needed} blocks to be available"), free)
    }

    pub(crate) fn quota_exceeded(namespace: &str, needed: usize, free: usize) -> Error {
        let kind = ErrorKind::QuotaExceeded { needed, free };
        let expected = format!("{needed} blocks to be available");
        Error::new(kind, format!("quota of namespace {namespace:?}"), expected, free)
    }

    /// What kind of error this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What was looked at.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What would have been accepted.
    #[must_use]
    pub fn expected(&self) -> &str {
        &self.expected
    }

    /// What came instead.
    #[must_use]
    pub fn got(&self) -> &str {
        &self.got
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, got {}", self.what, self.expected, self.got)
    }
}

impl std::error::Error for Error {}
