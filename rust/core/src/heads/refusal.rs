//! What a map is refused by, whatever of it is wrong.

use std::fmt::Display;

use crate::error::{Error, ErrorKind};

pub(super) fn corrupt(
    what: impl Into<String>,
    expected: impl Into<String>,
    got: impl Display,
) -> Error {
    Error::new(ErrorKind::CorruptHeadMap, what, expected, got)
}
