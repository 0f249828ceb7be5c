//! Strided rows of vectors, and query rows.

use super::error::{OpError, OpErrorKind, ensure, ensure_len};
use super::geometry::{PageGeometry, disjoint_extent};

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

    /// Proves that no two vectors share an element.
    pub(super) fn check_disjoint(&self, what: &'static str) -> Result<(), OpError> {
        let axes = [(self.rows, self.row_stride), (self.heads, self.head_stride)];
        let apart = disjoint_extent(&axes, self.head_dim).is_some();
        ensure(apart || self.rows == 0, OpErrorKind::Overlap, what, || {
            let got = format!("strides {:?}", (self.row_stride, self.head_stride));
            (format!("vectors of {} elements that share none", self.head_dim), got)
        })
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

/// The same to write to: vectors share no element.
#[derive(Debug)]
pub struct HeadRowsMut<'a, T> {
    /// Elements from the first vector's start on.
    pub values: &'a mut [T],
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

impl<T> HeadRowsMut<'_, T> {
    /// The same to read.
    #[must_use]
    pub fn as_rows(&self) -> HeadRows<'_, T> {
        let Self { rows, heads, head_dim, row_stride, head_stride, .. } = *self;
        HeadRows { values: &*self.values, rows, heads, head_dim, row_stride, head_stride }
    }

    /// The vector of (row, head), D elements. Valid after `validate()` of the op.
    ///
    /// # Panics
    /// If the row or head is out of range.
    #[must_use]
    pub fn vector(&mut self, row: usize, head: usize) -> &mut [T] {
        let start = row * self.row_stride + head * self.head_stride;
        &mut self.values[start..start + self.head_dim]
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
    pub fn validate(&self, geometry: &PageGeometry) -> Result<(), OpError> {
        self.vectors.validate("q")?;
        ensure_len("positions", self.vectors.rows, self.positions.len())?;
        ensure_len("head_dim of q", geometry.head_dim, self.vectors.head_dim)?;
        let (heads, kv_heads) = (self.vectors.heads, geometry.kv_heads);
        let grouped = heads > 0 && heads.is_multiple_of(kv_heads);
        ensure(grouped, OpErrorKind::Shape, "query heads", || {
            (format!("a positive multiple of {kv_heads} KV heads"), heads)
        })?;
        let lowest = self.positions.iter().copied().min().unwrap_or(0);
        ensure(lowest >= 0, OpErrorKind::OutOfRange, "positions", || ("at least 0", lowest))
    }
}
