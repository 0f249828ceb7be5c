//! The one error of the crate: what was looked at, what was expected, what came.

use std::{fmt, io};

use rustix::io::Errno;

/// Why a call was refused. What the store had acknowledged before is still there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    kind: ErrorKind,
    what: String,
    expected: String,
    got: String,
}

/// The kinds of error, for callers that react to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument that can never be right: a name, a size, a part that is not there.
    InvalidArgument,
    /// A file that ends before what its header says it holds.
    Truncated,
    /// A file that is not what its checksums say, or that cannot be what it says.
    Corrupt,
    /// A file of a newer or older schema than this version writes.
    OtherSchema,
    /// A whole shard of another model, dtype, RoPE regime, head map, layout, namespace or text.
    Foreign,
    /// A folder that belongs to another model.
    OtherModel,
    /// No shard, or no document, of that name.
    Unknown,
    /// More bytes than the quota of a namespace has left, with all evicted that may be.
    QuotaExceeded {
        /// Bytes that the call needed.
        needed: u64,
        /// Bytes that could have been had.
        free: u64,
    },
    /// More bytes than the store may hold, with all evicted that may be.
    Full {
        /// Bytes that the call needed.
        needed: u64,
        /// Bytes that could have been had.
        free: u64,
    },
    /// The disk, its quota or a limit of the process has no room for a file.
    DiskFull,
    /// The file system refused: permissions, a folder that is none, a device that fails.
    Io,
}

impl StoreError {
    /// An error from its parts; the text reads `what: expected …, got …`.
    pub fn new(
        kind: ErrorKind,
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> StoreError {
        StoreError { kind, what: what.into(), expected: expected.into(), got: got.to_string() }
    }

    pub(crate) fn invalid(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> StoreError {
        StoreError::new(ErrorKind::InvalidArgument, what, expected, got)
    }

    pub(crate) fn corrupt(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl fmt::Display,
    ) -> StoreError {
        StoreError::new(ErrorKind::Corrupt, what, expected, got)
    }

    pub(crate) fn truncated(expected: u64, got: u64) -> StoreError {
        let expected = format!("a file of {expected} bytes");
        StoreError::new(ErrorKind::Truncated, "shard", expected, format!("{got} bytes"))
    }

    /// There is no shard of that name.
    #[must_use]
    pub fn unknown(name: &str) -> StoreError {
        StoreError::new(ErrorKind::Unknown, "shard", name, "none of that name")
    }

    /// What the system said while something was tried, `to` being that: "to be written".
    pub(crate) fn io(what: impl Into<String>, to: &str, error: &io::Error) -> StoreError {
        let room = [Errno::NOSPC, Errno::DQUOT, Errno::FBIG].map(Errno::raw_os_error);
        let full = error.raw_os_error().is_some_and(|code| room.contains(&code));
        let kind = if full { ErrorKind::DiskFull } else { ErrorKind::Io };
        StoreError::new(kind, what, to, error)
    }

    /// The kind, to match on.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What was looked at.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What would have been right.
    #[must_use]
    pub fn expected(&self) -> &str {
        &self.expected
    }

    /// What came.
    #[must_use]
    pub fn got(&self) -> &str {
        &self.got
    }

    /// Whether the file itself is spoiled, for whomever it was meant.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(self.kind, ErrorKind::Truncated | ErrorKind::Corrupt)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, got {}", self.what, self.expected, self.got)
    }
}

impl std::error::Error for StoreError {}
