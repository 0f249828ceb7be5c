//! Strided rows of vectors, and how a score is made from them.

use super::entries::KvView;
use super::error::{OpError, OpErrorKind, ensure, ensure_len};
use super::rope::RopeTable;

/// A strided tensor [R, heads, D] whose last axis is contiguous.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows<'a, T> {
    /// Elements from the first vector's start on.
    pub values: &'a [T],
    /// R.
    pub rows: usize,
    /// Vectors of a row.
    pub heads: usize,
    /// D.
    pub head_dim: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one head to the next.
    pub head_stride: usize,
}

impl<'a, T> HeadRows<'a, T> {
    /// A tensor without gaps.
    #[must_use]
    pub fn contiguous(values: &'a [T], rows: usize, heads: usize, head_dim: usize) -> Self {
        let row_stride = heads * head_dim;
        Self { values, rows, heads, head_dim, row_stride, head_stride: head_dim }
    }

    /// The vector of (row, head), D elements. Valid after `validate()` of the op.
    ///
    /// # Panics
    /// If the row or head is out of range.
    #[must_use]
    pub fn vector(&self, row: usize, head: usize) -> &'a [T] {
        let start = row * self.row_stride + head * self.head_stride;
        &self.values[start..start + self.head_dim]
    }

    pub(crate) fn validate(&self, what: &'static str) -> Result<(), OpError> {
        if self.rows == 0 {
            return Ok(());
        }
        ensure(self.heads > 0, OpErrorKind::Shape, what, || ("at least one head", self.heads))?;
        let end = (self.rows - 1).checked_mul(self.row_stride).and_then(|row| {
            let head = (self.heads - 1).checked_mul(self.head_stride)?;
            row.checked_add(head)?.checked_add(self.head_dim)
        });
        let len = self.values.len();
        ensure(end.is_some_and(|end| end <= len), OpErrorKind::Shape, what, || {
            let (rows, heads, dim) = (self.rows, self.heads, self.head_dim);
            let strides = (self.row_stride, self.head_stride);
            (format!("elements for [{rows}, {heads}, {dim}] with strides {strides:?}"), len)
        })
    }
}

/// Query rows: vectors [R, H, D] and the position of each row, in any order.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a, T> {
    /// [R, H, D], already rotated to their own positions.
    pub vectors: HeadRows<'a, T>,
    /// [R], each at least 0.
    pub positions: &'a [i32],
}

impl<T> Queries<'_, T> {
    /// Checks shapes and positions. Of the vectors, only the length is looked at.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate<C>(&self, kv: &KvView<'_, C>) -> Result<(), OpError> {
        self.vectors.validate("q")?;
        ensure_len("positions", self.vectors.rows, self.positions.len())?;
        ensure_len("head_dim of q", kv.geometry.head_dim, self.vectors.head_dim)?;
        let (heads, kv_heads) = (self.vectors.heads, kv.geometry.kv_heads);
        let grouped = heads > 0 && heads.is_multiple_of(kv_heads);
        ensure(grouped, OpErrorKind::Shape, "query heads", || {
            (format!("a positive multiple of {kv_heads} KV heads"), heads)
        })?;
        let lowest = self.positions.iter().copied().min().unwrap_or(0);
        ensure(lowest >= 0, OpErrorKind::OutOfRange, "positions", || ("at least 0", lowest))
    }
}

/// How a score is made: `s = softcap(scale · qᵀ R(delta) k)`, kept where the key is visible.
///
/// A key is visible to a row when `key position ≤ row position` and, with a window w,
/// `key position > row position − w`; with a reach, each KV head has a window of its own, see
/// [`HeadReach`](super::HeadReach). Softcap c maps s to `c · tanh(s / c)`.
#[derive(Clone, Copy, Debug)]
pub struct Scoring<'a> {
    /// Factor on qᵀk, finite.
    pub scale: f32,
    /// Rotation of the model; read only where an entry has `delta ≠ 0`.
    pub rope: &'a RopeTable,
    /// Keys a row sees at most, itself included; at least 1. `None` where there is a reach.
    pub window: Option<u32>,
    /// Soft cap c > 0.
    pub softcap: Option<f32>,
}

impl Scoring<'_> {
    /// Checks the numbers against each other and against the geometry.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate<C>(&self, kv: &KvView<'_, C>) -> Result<(), OpError> {
        self.rope.check_fits(&kv.geometry)?;
        let invalid = OpErrorKind::InvalidArgument;
        ensure(self.scale.is_finite(), invalid, "scale", || ("a finite number", self.scale))?;
        let whole = self.scale * kv.scales.key;
        ensure(whole.is_finite(), invalid, "scale · key scale", || ("a finite number", whole))?;
        ensure(self.window != Some(0), invalid, "window", || ("at least 1", 0))?;
        let one = self.window.is_none() || kv.reach.is_none();
        ensure(one, invalid, "window", || ("none beside a reach, whose heads have theirs", "one"))?;
        let cap = self.softcap.unwrap_or(1.0);
        ensure(cap.is_finite() && cap > 0.0, invalid, "softcap", || ("above 0 and finite", cap))
    }
}
