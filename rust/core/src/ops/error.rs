//! What is wrong with an op's arguments.

use std::fmt;

/// An op was refused; nothing was read or written.
///
/// Returned by `validate()` only, never by the arithmetic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    kind: OpErrorKind,
    what: &'static str,
    expected: String,
    got: String,
}

/// The kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpErrorKind {
    /// A length, stride or count does not fit the others.
    Shape,
    /// An index, position or offset lies outside what it indexes.
    OutOfRange,
    /// Two ranges that must be disjoint overlap.
    Overlap,
    /// A number that no backend can work with, such as a scale that is not finite.
    InvalidArgument,
    /// A combination that no version carries out.
    Unsupported,
}

impl OpError {
    pub(crate) fn new(
        kind: OpErrorKind,
        what: &'static str,
        expected: impl fmt::Display,
        got: impl fmt::Display,
    ) -> Self {
        Self { kind, what, expected: expected.to_string(), got: got.to_string() }
    }

    /// The kind of refusal.
    #[must_use]
    pub fn kind(&self) -> OpErrorKind {
        self.kind
    }

    /// The argument that was refused.
    #[must_use]
    pub fn what(&self) -> &'static str {
        self.what
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

impl fmt::Display for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, got {}", self.what, self.expected, self.got)
    }
}

impl std::error::Error for OpError {}

/// `Ok` when `holds`; the messages are only built when it does not.
pub(crate) fn ensure<E: fmt::Display, G: fmt::Display>(
    holds: bool,
    kind: OpErrorKind,
    what: &'static str,
    messages: impl FnOnce() -> (E, G),
) -> Result<(), OpError> {
    if holds {
        return Ok(());
    }
    let (expected, got) = messages();
    Err(OpError::new(kind, what, expected, got))
}

/// A length that must equal another.
pub(crate) fn ensure_len(what: &'static str, expected: usize, got: usize) -> Result<(), OpError> {
    ensure(expected == got, OpErrorKind::Shape, what, || {
        (format!("{expected} elements"), format!("{got}"))
    })
}

/// The length of a tensor without gaps, which must be the product of its sizes; where these come
/// from strides of 0 it may be beyond any number.
pub(crate) fn ensure_size(what: &'static str, sizes: &[usize], got: usize) -> Result<(), OpError> {
    let size = sizes.iter().try_fold(1usize, |size, &axis| size.checked_mul(axis));
    ensure(size == Some(got), OpErrorKind::Shape, what, || {
        let expected = size.map_or_else(|| format!("as many as {sizes:?}"), |n| n.to_string());
        (format!("{expected} elements"), got)
    })
}

/// How many rows of `row` elements a tensor of `got` has, which must be whole ones.
pub(crate) fn ensure_rows(what: &'static str, row: usize, got: usize) -> Result<usize, OpError> {
    ensure(got.is_multiple_of(row), OpErrorKind::Shape, what, || {
        (format!("a multiple of {row} elements"), got)
    })?;
    Ok(got / row.max(1))
}
