//! What `rotate_rows` takes from Python, wherever the rows lie.

use kvweave_core::ops::{HeadRows, Pairing};
use pyo3::prelude::*;

use crate::arguments::raised;
use crate::choices::pairing_kind;
use crate::dlpack::{Borrowed, borrow};
use crate::failure::Failure;
use crate::tensor::TensorRef;

/// Queries, and keys if there are any.
pub type Vectors<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// The tensors of a call, borrowed.
pub struct Rotation<'py> {
    q: Borrowed<'py>,
    k: Option<Borrowed<'py>>,
    out: Option<(Borrowed<'py>, Option<Borrowed<'py>>)>,
    cos: Borrowed<'py>,
    sin: Borrowed<'py>,
    pub pairing: Pairing,
}

/// Vectors [R, heads, D] that are rotated.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub name: &'static str,
    /// Where they are written.
    pub target: &'a TensorRef,
    /// Where they are read, by name; none: where they are written.
    pub source: Option<(&'static str, &'a TensorRef)>,
}

impl<'py> Rotation<'py> {
    pub fn of(
        (q, k): &Vectors<'py>,
        (cos, sin): &(Bound<'py, PyAny>, Bound<'py, PyAny>),
        pairing: &str,
        out: Option<&Vectors<'py>>,
    ) -> PyResult<Self> {
        let key = |what: &str, k: &Option<Bound<'py, PyAny>>| {
            k.as_ref().map(|k| borrow(what, k)).transpose()
        };
        let out = out
            .map(|(q, k)| Ok::<_, PyErr>((borrow("out of q", q)?, key("out of k", k)?)))
            .transpose()?;
        let pairing = raised(q.py(), pairing_kind(pairing))?;
        let (cos, sin) = (borrow("cos", cos)?, borrow("sin", sin)?);
        Ok(Self { q: borrow("q", q)?, k: key("k", k)?, out, cos, sin, pairing })
    }

    pub fn q(&self) -> &TensorRef {
        &self.q.tensor
    }

    /// Cosines and sines [R, W].
    pub fn turns(&self) -> [(&'static str, &TensorRef); 2] {
        [("cos", &self.cos.tensor), ("sin", &self.sin.tensor)]
    }

    /// Queries, then keys. All lie on one device, and what is written apart from all else; vectors
    /// of both are of one size.
    pub fn parts(&self) -> Result<Vec<Part<'_>>, Failure> {
        let part = |name, target| Part { name, target, source: None };
        let parts = match (&self.out, &self.k) {
            (None, None) => vec![part("q", self.q())],
            (None, Some(k)) => vec![part("q", self.q()), part("k", &k.tensor)],
            (Some((q, None)), None) => vec![self.query_to(q)],
            (Some((q, Some(out))), Some(k)) => {
                let keys = part("out of k", &out.tensor);
                vec![self.query_to(q), Part { source: Some(("k", &k.tensor)), ..keys }]
            }
            (Some((_, out)), _) => {
                let text = |is_there: bool| if is_there { "a tensor" } else { "None" };
                let (expected, got) = (text(self.k.is_some()), text(out.is_some()));
                return Err(Failure::invalid("out of k", expected, got));
            }
        };
        self.check(&parts)?;
        Ok(parts)
    }

    fn query_to<'a>(&'a self, out: &'a Borrowed<'py>) -> Part<'a> {
        Part { name: "out of q", target: &out.tensor, source: Some(("q", self.q())) }
    }

    fn check(&self, parts: &[Part<'_>]) -> Result<(), Failure> {
        let device = self.q().device;
        let sources = parts.iter().filter_map(|part| part.source);
        let read: Vec<_> = self.turns().into_iter().chain(sources).collect();
        let written = parts.iter().map(|part| (part.name, part.target));
        for (what, tensor) in read.iter().copied().chain(written.clone()) {
            tensor.expect_device(what, device)?;
        }
        for (what, tensor) in written {
            tensor.expect_writable(what)?;
            read.iter().try_for_each(|(name, other)| tensor.expect_apart(what, other, name))?;
        }
        let [q, k] = parts else { return Ok(()) };
        if let (&[_, _, of_q], &[_, _, of_k]) = (q.target.shape(), k.target.shape())
            && of_q != of_k
        {
            return Err(Failure::invalid("head_dim of k", of_q, of_k));
        }
        expect_rows_apart((q.name, q.target), (k.name, k.target))
    }
}

/// Cosines or sines [R, W] by rows, as vectors [R, 1, W]; their elements are given.
pub fn turn_rows<'a, T>(
    what: &str,
    tensor: &TensorRef,
    values: &'a [T],
) -> Result<HeadRows<'a, T>, Failure> {
    tensor.expect_shape(what, &[("R", None), ("W", None)])?;
    let (&[rows, width], &[row, last]) = (tensor.shape(), tensor.strides()) else {
        return Err(Failure::invalid(what, "2 axes", tensor.axes));
    };
    if last != 1 && width > 1 {
        let got = format!("strides {:?}", tensor.strides());
        return Err(Failure::invalid(what, "a contiguous last axis", got));
    }
    // Rows without elements lie nowhere.
    let row_stride = if width == 0 { 0 } else { row.unsigned_abs() };
    Ok(HeadRows { values, rows, heads: 1, head_dim: width, row_stride, head_stride: 0 })
}

/// Refuses rows that share memory. Those of one fused projection may lie between each other: with
/// one stride, each within what the other leaves of it.
fn expect_rows_apart(
    (what, a): (&str, &TensorRef),
    (named, b): (&str, &TensorRef),
) -> Result<(), Failure> {
    let spans = (a.extent(what)?, b.extent(named)?);
    let outcome = a.expect_apart(what, b, named);
    let (&[a_rows, ..], &[a_stride, ..]) = (a.shape(), a.strides()) else { return outcome };
    let (&[b_rows, ..], &[b_stride, ..]) = (b.shape(), b.strides()) else { return outcome };
    if outcome.is_ok() || (a_rows, a_stride) != (b_rows, b_stride) || a.dtype != b.dtype {
        return outcome;
    }
    // Elements of one row, of which extents have one beside the strides.
    let stride = a_stride.unsigned_abs();
    let [a_span, b_span] = [spans.0, spans.1].map(|span| span - (a_rows - 1) * stride);
    let gap = (b.ptr as usize).abs_diff(a.ptr as usize);
    let (low, high) = if a.ptr <= b.ptr { (a_span, b_span) } else { (b_span, a_span) };
    let bytes = a.dtype.bytes();
    if gap >= low * bytes && gap + high * bytes <= stride * bytes { Ok(()) } else { outcome }
}
