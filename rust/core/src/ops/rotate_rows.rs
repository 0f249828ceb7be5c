//! Params of `rotate_rows`.

use super::error::{OpError, OpErrorKind, ensure, ensure_len};
use super::queries::{HeadRows, HeadRowsMut};
use super::rope::Pairing;

/// Rotates vectors of rows, each row by its own cosines and sines: rotary position embedding of
/// new queries or keys (RoFormer, section 3.4.2). Pair (x, y) becomes
/// `(x·cos − y·sin, x·sin + y·cos)`, widened and rounded once; elements past the pairs stay.
///
/// Queries and keys of a layer are two such calls.
#[derive(Debug)]
pub struct RotateRows<'a, T> {
    /// How refusals call the vectors.
    pub name: &'static str,
    /// [R, heads, D], written.
    pub vectors: HeadRowsMut<'a, T>,
    /// Where the vectors are read; none: where they are written.
    pub source: Option<HeadRows<'a, T>>,
    /// [R, 1, W], W ≤ D even: pair i turns by element i. The second half is not read.
    pub cos: HeadRows<'a, T>,
    /// The same of the sine.
    pub sin: HeadRows<'a, T>,
    /// Which elements are pairs.
    pub pairing: Pairing,
}

impl<T> RotateRows<'_, T> {
    /// Proves that the shapes agree and that no element is written twice.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let source = self.source.as_ref().map(|source| ("source", source));
        let written = self.vectors.as_rows();
        validate_turns((self.name, &written), source, [("cos", &self.cos), ("sin", &self.sin)])
    }

    /// W/2.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.cos.head_dim / 2
    }
}

/// The same as [`RotateRows::validate`]. Of elements, only the number is looked at: memory may be
/// elsewhere, such as on a device.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_turns<T>(
    (name, written): (&'static str, &HeadRows<'_, T>),
    source: Option<(&'static str, &HeadRows<'_, T>)>,
    turns: [(&'static str, &HeadRows<'_, T>); 2],
) -> Result<(), OpError> {
    written.validate(name)?;
    written.check_disjoint(name)?;
    if let Some((what, source)) = source {
        source.validate(what)?;
        let shape = |of: &HeadRows<'_, T>| [of.rows, of.heads, of.head_dim];
        ensure(shape(written) == shape(source), OpErrorKind::Shape, name, || {
            (format!("shape {:?}", shape(source)), format!("{:?}", shape(written)))
        })?;
    }
    let width = turns[0].1.head_dim;
    for (what, turn) in turns {
        turn.validate(what)?;
        ensure_len(what, written.rows, turn.rows)?;
        ensure(turn.head_dim == width, OpErrorKind::Shape, what, || {
            (format!("the width {width} of cos"), turn.head_dim)
        })?;
    }
    ensure(width.is_multiple_of(2), OpErrorKind::Shape, "rotary_dim", || {
        ("an even number", width)
    })?;
    ensure(width <= written.head_dim, OpErrorKind::Shape, "rotary_dim", || {
        (format!("at most the head dim {}", written.head_dim), width)
    })
}
