//! The arguments of `step_tables` and their checks, which are the same wherever they lie.

use kvweave_core::ops::{StepShape, TableSpan};
use pyo3::prelude::*;

use crate::arguments::{count, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::Failure;
use crate::scalars::Number;
use crate::tensor::{Device, TensorRef};

type Any<'py> = Bound<'py, PyAny>;
/// Blocks, lengths, query_start, slot_mapping and places.
pub type BatchArguments<'py> = (Any<'py>, Any<'py>, Any<'py>, Any<'py>, Option<Any<'py>>);
/// Positions, slots, entries and offsets.
pub type Results<'py> = (Any<'py>, Any<'py>, Any<'py>, Any<'py>);
/// Tokens of a page, and pages of ours that make one of the engine's.
pub type Sizes = (Number, Number);
/// Window, sink and columns of a table.
pub type SpanArguments = (Number, Number, Number);

/// The arguments, borrowed.
pub struct Borrows<'py> {
    pub blocks: Borrowed<'py>,
    pub lengths: Borrowed<'py>,
    pub query_start: Borrowed<'py>,
    pub slot_mapping: Borrowed<'py>,
    pub places: Option<Borrowed<'py>>,
    pub positions: Borrowed<'py>,
    pub slots: Borrowed<'py>,
    pub entries: Borrowed<'py>,
    pub offsets: Borrowed<'py>,
    sizes: Sizes,
    spans: Vec<TableSpan>,
}

impl<'py> Borrows<'py> {
    pub fn of(
        py: Python<'py>,
        batch: &BatchArguments<'py>,
        out: &Results<'py>,
        sizes: Sizes,
        spans: &[SpanArguments],
    ) -> PyResult<Self> {
        let spans = spans.iter().map(span_of).collect::<Result<Vec<_>, Failure>>();
        Ok(Self {
            blocks: borrow("blocks", &batch.0)?,
            lengths: borrow("lengths", &batch.1)?,
            query_start: borrow("query_start", &batch.2)?,
            slot_mapping: borrow("slot_mapping", &batch.3)?,
            places: batch.4.as_ref().map(|places| borrow("places", places)).transpose()?,
            positions: borrow("positions", &out.0)?,
            slots: borrow("slots", &out.1)?,
            entries: borrow("entries", &out.2)?,
            offsets: borrow("offsets", &out.3)?,
            sizes,
            spans: raised(py, spans)?,
        })
    }

    /// Proves that every tensor is on the device of `blocks`, of its dtype and shape, and that what
    /// is written lies apart from all else.
    pub fn shape(&self) -> Result<StepShape<'_>, Failure> {
        let lengths = &self.lengths.tensor;
        lengths.expect_shape("lengths", &[("B", None)])?;
        let requests = lengths.shape()[0];
        let rows = self.slot_mapping.tensor.shape().first().copied().unwrap_or(0);
        let tables = self.spans.len();
        let blocks = &self.blocks.tensor;
        blocks.expect_shape("blocks", &[("B", Some(requests)), ("M", None)])?;
        let pages = match &self.places {
            None => None,
            Some(places) => {
                places.tensor.expect_shape("places", &[("tables", Some(tables)), ("V", None)])?;
                Some(places.tensor.shape()[1])
            }
        };
        let entries = &self.entries.tensor;
        entries.expect_shape("entries", &[("N", None), ("5", Some(5))])?;
        let shape = StepShape {
            requests,
            rows,
            columns: blocks.shape()[1],
            page_tokens: count("page_tokens", &self.sizes.0)?,
            block_pages: count("block_pages", &self.sizes.1)?,
            spans: &self.spans,
            places: pages,
        };
        shape.validate(entries.shape()[0])?;
        let (r, pair) = (("R", Some(rows)), ("2", Some(2)));
        let of_tables = [("tables", Some(tables)), r, pair];
        let of_slots = if pages.is_some() { &of_tables[..] } else { &of_tables[1..] };
        let ends = requests.saturating_mul(tables).saturating_add(1);
        self.query_start.tensor.expect_shape("query_start", &[("B+1", Some(requests + 1))])?;
        self.slot_mapping.tensor.expect_shape("slot_mapping", &[r])?;
        self.positions.tensor.expect_shape("positions", &[r])?;
        self.slots.tensor.expect_shape("slots", of_slots)?;
        self.offsets.tensor.expect_shape("offsets", &[("B·tables+1", Some(ends))])?;
        self.check_memory(blocks.device)?;
        Ok(shape)
    }

    fn check_memory(&self, device: Device) -> Result<(), Failure> {
        let (read, written) = (self.read(), self.written());
        for (what, tensor) in read.iter().chain(&written) {
            let dtype = if *what == "slot_mapping" { DType::I64 } else { DType::I32 };
            tensor.expect_dtype(what, dtype)?;
            tensor.expect_device(what, device)?;
            tensor.expect_aligned(what, dtype.bytes())?;
            if *what != "blocks" {
                tensor.expect_contiguous(what)?;
            }
        }
        let blocks = &self.blocks.tensor;
        if blocks.shape()[1] > 1 && blocks.strides()[1] != 1 {
            let got = format!("strides {:?}", blocks.strides());
            return Err(Failure::invalid("blocks", "a contiguous last axis", got));
        }
        for (i, (what, tensor)) in written.iter().enumerate() {
            tensor.expect_writable(what)?;
            let others = read.iter().chain(&written[..i]);
            others.clone().try_for_each(|(name, other)| tensor.expect_apart(what, other, name))?;
        }
        Ok(())
    }

    fn read(&self) -> Vec<(&'static str, &TensorRef)> {
        let mut read = vec![
            ("blocks", &self.blocks.tensor),
            ("lengths", &self.lengths.tensor),
            ("query_start", &self.query_start.tensor),
            ("slot_mapping", &self.slot_mapping.tensor),
        ];
        read.extend(self.places.as_ref().map(|places| ("places", &places.tensor)));
        read
    }

    fn written(&self) -> [(&'static str, &TensorRef); 4] {
        [
            ("positions", &self.positions.tensor),
            ("slots", &self.slots.tensor),
            ("entries", &self.entries.tensor),
            ("offsets", &self.offsets.tensor),
        ]
    }
}

/// Elements from one row of `blocks` to the next.
pub fn block_stride(blocks: &TensorRef) -> usize {
    blocks.strides()[0].unsigned_abs()
}

fn span_of((window, sink, columns): &SpanArguments) -> Result<TableSpan, Failure> {
    let number = |what: &str, value: &Number| {
        let value = value.clone().whole(what)?;
        let known = i32::try_from(value).ok().and_then(|value| u32::try_from(value).ok());
        known.ok_or_else(|| Failure::invalid(what, "a number from 0 to 2^31 − 1", value))
    };
    Ok(TableSpan {
        window: number("window of a span", window)?,
        sink: number("sink of a span", sink)?,
        columns: number("columns of a span", columns)?,
    })
}
