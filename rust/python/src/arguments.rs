//! Arguments of the ops, borrowed and checked for what a params struct cannot see: dtype, device,
//! rank, strides, overlap.
//!
//! Python holds an op's arguments for the whole call, so their memory lives. That nobody writes to
//! them from another thread meanwhile is asked of the caller, as torch asks it for its own ops.

use kvweave_core::ops::{HeadRows, KvScales, PackedFormat, PageGeometry, Reach};
use pyo3::prelude::*;

use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::scalars::Number;
use crate::tensor::{Stored, TensorRef};

/// Tables of [N], [N, `COLUMNS`] or [tables, N, 2] i32.
pub struct Table<'py>(pub Borrowed<'py>);

impl<'py> Table<'py> {
    pub fn of(what: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(Self(borrow(what, object)?))
    }

    pub fn rows<const COLUMNS: usize>(&self, what: &str) -> Result<&[[i32; COLUMNS]], Failure> {
        let tensor = &self.0.tensor;
        tensor.expect_dtype(what, DType::I32)?;
        tensor.expect_shape(what, &[("N", None), ("columns", Some(COLUMNS))])?;
        Ok(self.flat(what)?.as_chunks().0)
    }

    /// Rows of a number of columns that is known at run time, one after the other.
    pub fn wide(&self, what: &str, columns: usize) -> Result<&[i32], Failure> {
        self.0.tensor.expect_dtype(what, DType::I32)?;
        self.0.tensor.expect_shape(what, &[("N", None), ("columns", Some(columns))])?;
        self.flat(what)
    }

    /// Numbers [N].
    pub fn numbers(&self, what: &str) -> Result<&[i32], Failure> {
        self.0.tensor.expect_dtype(what, DType::I32)?;
        self.0.tensor.expect_shape(what, &[("N", None)])?;
        self.flat(what)
    }

    /// Slots of one table, or of those of a reach one after the other.
    pub fn slots(&self, what: &str, reach: Option<Reach<'_>>) -> Result<&[[i32; 2]], Failure> {
        let Some(Reach { tables, .. }) = reach else { return self.rows(what) };
        let tensor = &self.0.tensor;
        tensor.expect_dtype(what, DType::I32)?;
        let shape = [("tables", Some(tables)), ("R", None), ("columns", Some(2))];
        tensor.expect_shape(what, &shape)?;
        Ok(self.flat(what)?.as_chunks().0)
    }

    pub fn list(&self, what: &str) -> Result<&[i32], Failure> {
        self.0.tensor.expect_dtype(what, DType::I32)?;
        self.0.tensor.expect_shape(what, &[("N", None)])?;
        self.flat(what)
    }

    fn flat(&self, what: &str) -> Result<&[i32], Failure> {
        self.0.tensor.expect_contiguous(what)?;
        // SAFETY: the owner is held by self; writers are excluded as the head of this file says.
        unsafe { self.0.tensor.slice(what) }
    }
}

pub fn raised<T>(py: Python<'_>, outcome: Result<T, Failure>) -> PyResult<T> {
    outcome.map_err(|failure| failure.raise(py))
}

/// The paged tensor [pages, 2, P, D] and its geometry for `layers` of `kv_heads`.
pub fn pages_of(
    cache: &TensorRef,
    layers: usize,
    kv_heads: usize,
) -> Result<PageGeometry, Failure> {
    arena_of("cache", cache, None, layers, kv_heads)
}

fn arena_of(
    what: &str,
    tensor: &TensorRef,
    dim: Option<usize>,
    layers: usize,
    kv_heads: usize,
) -> Result<PageGeometry, Failure> {
    tensor.expect_shape(what, &[("pages", None), ("2", Some(2)), ("P", None), ("D", dim)])?;
    tensor.expect_contiguous(what)?;
    let &[_, _, page_tokens, head_dim] = tensor.shape() else {
        return Err(Failure::invalid(what, "4 axes", tensor.axes));
    };
    Ok(PageGeometry::arena(layers, kv_heads, page_tokens, head_dim))
}

/// P' of the paged tensor [pages, 2, P', D] that packed pages are made of, or become.
pub fn page_tokens_of(cache: &TensorRef, packed: &PackedFormat) -> Result<usize, Failure> {
    let exact = arena_of("cache", cache, Some(packed.head_dim()), 1, 1)?.page_tokens;
    if exact == 0 || !packed.page_tokens().is_multiple_of(exact) {
        let expected = format!("a divisor of {}", packed.page_tokens());
        return Err(Failure::invalid("page_tokens", expected, exact));
    }
    Ok(exact)
}

/// The geometry of another paged tensor [pages, 2, P, D] that blocks of the cache are read from.
pub fn source_of(
    source: &TensorRef,
    cache: &TensorRef,
    of_cache: &PageGeometry,
) -> Result<PageGeometry, Failure> {
    source.expect_dtype("source", cache.dtype)?;
    cache.expect_apart("cache", source, "source")?;
    let PageGeometry { layers, kv_heads, head_dim, .. } = *of_cache;
    arena_of("source", source, Some(head_dim), layers, kv_heads)
}

/// A strided tensor [rows, heads, D] whose last axis is contiguous.
pub fn head_rows<'a, T: Stored>(
    what: &str,
    tensor: &TensorRef,
) -> Result<HeadRows<'a, T>, Failure> {
    // SAFETY: the owner outlives the call that made `tensor`; writers are excluded as the head of
    // this file says.
    let values = unsafe { tensor.slice(what) }?;
    rows_of(what, tensor, values)
}

/// The same with its elements given.
pub fn rows_of<'a, T>(
    what: &str,
    tensor: &TensorRef,
    values: &'a [T],
) -> Result<HeadRows<'a, T>, Failure> {
    tensor.expect_shape(what, &[("R", None), ("heads", None), ("D", None)])?;
    let (&[rows, heads, head_dim], &[row, head, last]) = (tensor.shape(), tensor.strides()) else {
        return Err(Failure::invalid(what, "3 axes", tensor.axes));
    };
    if last != 1 && head_dim > 1 {
        let got = format!("strides {:?}", tensor.strides());
        return Err(Failure::invalid(what, "a contiguous last axis", got));
    }
    let (row_stride, head_stride) = (row.unsigned_abs(), head.unsigned_abs());
    Ok(HeadRows { values, rows, heads, head_dim, row_stride, head_stride })
}

/// A contiguous tensor of `shape` to write results to, apart from everything that is read.
pub fn output<'a, T: Stored>(
    what: &str,
    tensor: &TensorRef,
    shape: &[(&str, Option<usize>)],
    read: &[(&str, &TensorRef)],
) -> Result<&'a mut [T], Failure> {
    tensor.expect_shape(what, shape)?;
    tensor.expect_contiguous(what)?;
    for (name, other) in read {
        tensor.expect_apart(what, other, name)?;
    }
    // SAFETY: apart from every argument that is read, as just checked; the owner outlives the call
    // that made `tensor`.
    unsafe { tensor.slice_mut(what) }
}

/// The scales of keys and values as they came from Python: none are 1.
pub fn scales_of(kv_scales: Option<(f32, f32)>) -> KvScales {
    kv_scales.map_or(KvScales::ONE, |(key, value)| KvScales { key, value })
}

/// A count or index that came as a Python int.
pub fn count(what: &str, value: impl Into<Number>) -> Result<usize, Failure> {
    let value = value.into().whole(what)?;
    usize::try_from(value).map_err(|_| Failure::invalid(what, "at least 0", value))
}
