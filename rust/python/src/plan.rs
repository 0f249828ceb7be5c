//! `ReusePlan` and its spans as Python sees them.

use std::sync::Arc;

use kvweave_core::{self as core, Outcome, SegmentSource};
use numpy::{PyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::drawn::drawn;
use crate::failure::call_core;
use crate::scalars::Text;

/// What happens to every token of a prompt: reused by prefix, reused by segment, or recomputed.
#[pyclass(frozen, module = "kvweave._native")]
pub struct ReusePlan(pub Arc<core::ReusePlan>);

/// Tokens [start, end) of a prompt with one outcome.
#[pyclass(frozen, module = "kvweave._native")]
pub struct PlanSpan(core::PlanSpan);

#[pymethods]
impl ReusePlan {
    /// T, the prompt's tokens.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens
    }

    /// Sorted, gap-free over [0, T).
    #[getter]
    fn spans(&self) -> Vec<PlanSpan> {
        self.0.spans.iter().cloned().map(PlanSpan).collect()
    }

    /// Tokens reused by exact prefix.
    #[getter]
    fn reused_prefix(&self) -> usize {
        self.0.prefix_tokens()
    }

    /// Tokens reused by segment.
    #[getter]
    fn reused_segment(&self) -> usize {
        self.0.segment_tokens()
    }

    /// Tokens that the request computes.
    #[getter]
    fn recomputed(&self) -> usize {
        self.0.recomputed_tokens()
    }

    /// Positions that the request computes, i32 [R], sorted.
    fn rows<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i32>> {
        self.0.rows().to_pyarray(py)
    }

    /// Counts and spans as plain Python values.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let made = PyDict::new(py);
        made.set_item("tokens", self.0.tokens)?;
        made.set_item("reused_prefix", self.reused_prefix())?;
        made.set_item("reused_segment", self.reused_segment())?;
        made.set_item("recomputed", self.recomputed())?;
        let spans: PyResult<Vec<_>> =
            self.0.spans.iter().cloned().map(|span| PlanSpan(span).to_dict(py)).collect();
        made.set_item("spans", PyList::new(py, spans?)?)?;
        Ok(made)
    }

    /// Reads and validates the JSON form, which pickles hold.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: Text<'_>) -> PyResult<Self> {
        call_core(py, || core::ReusePlan::from_json(text.0)).map(|plan| Self(Arc::new(plan)))
    }

    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        call_core(py, || self.0.to_json())
    }

    /// A notebook shows the plan as a picture.
    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        drawn(slf.as_any(), "plan_html")
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py)?,)))
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!(
            "ReusePlan(tokens={}, reused_prefix={}, reused_segment={}, recomputed={})",
            self.tokens(),
            self.reused_prefix(),
            self.reused_segment(),
            self.recomputed()
        )
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

#[pymethods]
impl PlanSpan {
    /// First position.
    #[getter]
    fn start(&self) -> usize {
        self.0.start
    }

    /// One past the last position.
    #[getter]
    fn end(&self) -> usize {
        self.0.end
    }

    /// "prefix", "segment" or "recompute".
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0.outcome {
            Outcome::Prefix => "prefix",
            Outcome::Segment { .. } => "segment",
            Outcome::Recompute { .. } => "recompute",
        }
    }

    /// Why it is recomputed, a stable name such as "not-cached"; None where it is reused.
    #[getter]
    fn reason(&self) -> Option<&'static str> {
        match self.0.outcome {
            Outcome::Recompute { reason } => Some(reason.name()),
            _ => None,
        }
    }

    /// The reason as a sentence; None where it is reused.
    #[getter]
    fn explanation(&self) -> Option<&'static str> {
        match self.0.outcome {
            Outcome::Recompute { reason } => Some(reason.sentence()),
            _ => None,
        }
    }

    /// New position minus cached position: 0 for a prefix, None where nothing is reused.
    #[getter]
    fn delta(&self) -> Option<i32> {
        match self.0.outcome {
            Outcome::Prefix => Some(0),
            Outcome::Segment { delta, .. } => Some(delta),
            Outcome::Recompute { .. } => None,
        }
    }

    /// Where a segment's KV comes from: the name of a frozen segment, or "request" for the blocks
    /// of an earlier request; None elsewhere.
    #[getter]
    fn source(&self) -> Option<&str> {
        match &self.0.outcome {
            Outcome::Segment { source: SegmentSource::Frozen(name), .. } => Some(name),
            Outcome::Segment { source: SegmentSource::Request, .. } => Some("request"),
            _ => None,
        }
    }

    /// Whether the donor computed the segment in full; None where no segment is reused.
    #[getter]
    fn exact(&self) -> Option<bool> {
        match self.0.outcome {
            Outcome::Segment { exact, .. } => Some(exact),
            _ => None,
        }
    }

    /// Whether the donor's text is the marked segment's from its first token on: the segment's own
    /// encoding. False where only tokens of another text are equal, and for discovered text; None
    /// where no segment is reused.
    #[getter]
    fn own(&self) -> Option<bool> {
        match self.0.outcome {
            Outcome::Segment { own, .. } => Some(own),
            _ => None,
        }
    }

    /// The fields as plain Python values.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let made = PyDict::new(py);
        made.set_item("start", self.start())?;
        made.set_item("end", self.end())?;
        made.set_item("kind", self.kind())?;
        made.set_item("reason", self.reason())?;
        made.set_item("delta", self.delta())?;
        made.set_item("source", self.source())?;
        made.set_item("exact", self.exact())?;
        made.set_item("own", self.own())?;
        Ok(made)
    }

    /// Reads the JSON form, which pickles hold.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: Text<'_>) -> PyResult<Self> {
        call_core(py, || core::PlanSpan::from_json(text.0)).map(Self)
    }

    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        call_core(py, || self.0.to_json())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py)?,)))
    }

    fn __repr__(&self) -> String {
        let why = self.reason().or(self.source()).unwrap_or("exact");
        format!("PlanSpan([{}, {}) {}: {why})", self.start(), self.end(), self.kind())
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
