//! Params of `step_tables`.

use super::error::{OpError, OpErrorKind, ensure, ensure_len};

/// Most tables of a request: their spans go to a kernel by value.
pub const MOST_TABLES: usize = 64;

/// An engine's description of a batch as the tables of our ops: positions and slots of the rows
/// that a step computes, entries of what they see.
///
/// The engine numbers pages of P tokens in one block table a request (vLLM: `block_table`,
/// `seq_lens`, `query_start_loc`, `slot_mapping`). Its page b is our block `b · block_pages`, or,
/// with `places`, in table t the block `places[t][b]`, where the entry and the slot of a page that
/// is nowhere say so: block 0 and slot −1.
///
/// Table t of a request lists, in order, the pages that some row of the request sees: those of the
/// first `sink` keys and those from the first row's window on, at most `columns`.
#[derive(Debug)]
pub struct StepTables<'a> {
    /// Sizes of everything.
    pub shape: StepShape<'a>,
    /// [B, M] page numbers, rows `block_stride` apart.
    pub blocks: &'a [i32],
    /// Elements from one row of `blocks` to the next.
    pub block_stride: usize,
    /// [B] tokens of each request, the rows of the step among them.
    pub lengths: &'a [i32],
    /// [B + 1]: where the rows of each request begin and the last one's end. Rows behind that pad a
    /// batch: they get the last request's following positions.
    pub query_start: &'a [i32],
    /// [R]: page · P + slot of each row; below 0 for one that is written nowhere.
    pub slot_mapping: &'a [i64],
    /// [tables, pages], 0 where a page is nowhere.
    pub places: Option<&'a [i32]>,
    /// [R].
    pub positions: &'a mut [i32],
    /// [tables, R] pairs `[block, slot]`, (−1, −1) for a row that is written nowhere.
    pub slots: &'a mut [[i32; 2]],
    /// At least B · Σ columns rows `[block, 0, end, position, 0]`; what is not listed stays as it
    /// was.
    pub entries: &'a mut [[i32; 5]],
    /// [B · tables + 1].
    pub offsets: &'a mut [i32],
}

/// Sizes of a step's tables.
#[derive(Clone, Copy, Debug)]
pub struct StepShape<'a> {
    /// B, at least 1.
    pub requests: usize,
    /// R.
    pub rows: usize,
    /// M: page numbers of a request.
    pub columns: usize,
    /// P.
    pub page_tokens: usize,
    /// Our pages of one of the engine's: 1 where `places` say where it lies.
    pub block_pages: usize,
    /// One a table.
    pub spans: &'a [TableSpan],
    /// Page numbers that `places` have, where there are any.
    pub places: Option<usize>,
}

/// What the rows of a table see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSpan {
    /// The latest keys of a row, itself among them; 0 for all.
    pub window: u32,
    /// The first keys of a request; no matter without a window.
    pub sink: u32,
    /// Most entries of a request.
    pub columns: u32,
}

impl StepShape<'_> {
    /// Entries that there must be room for.
    #[must_use]
    pub fn entries(&self) -> usize {
        let columns = self.spans.iter().map(|span| span.columns as usize);
        columns.fold(0, usize::saturating_add).saturating_mul(self.requests)
    }

    /// Proves that sizes go together and that numbers of tables stay below 2^31; `room` is that of
    /// the entries.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self, room: usize) -> Result<(), OpError> {
        let limit = i32::MAX.unsigned_abs() as usize;
        let sizes = [
            ("requests", self.requests, 1),
            ("page_tokens", self.page_tokens, 1),
            ("block_pages", self.block_pages, 1),
            ("rows", self.rows, 0),
            ("columns of blocks", self.columns, 0),
            ("pages of places", self.places.unwrap_or(0), 0),
        ];
        for (what, size, least) in sizes {
            ensure((least..=limit).contains(&size), OpErrorKind::OutOfRange, what, || {
                (format!("a number from {least} to {limit}"), size)
            })?;
        }
        let tables = self.spans.len();
        let most = if self.places.is_some() { MOST_TABLES } else { 1 };
        ensure((1..=most).contains(&tables), OpErrorKind::Shape, "spans", || {
            let case = if self.places.is_some() { "with places" } else { "without places" };
            (format!("from 1 to {most}, {case}"), tables)
        })?;
        ensure(
            self.block_pages == 1 || self.places.is_none(),
            OpErrorKind::Shape,
            "block_pages",
            || ("1 beside places", self.block_pages),
        )?;
        let needed = self.entries();
        ensure(needed <= limit, OpErrorKind::OutOfRange, "columns of spans", || {
            (format!("at most {limit} entries"), needed)
        })?;
        ensure(needed <= room, OpErrorKind::Shape, "entries", || {
            (format!("at least {needed} rows"), room)
        })
    }
}

impl TableSpan {
    /// The pages of a request that a table lists. `length` is its tokens, of which the `computed`
    /// last are rows of the step; it has `held` pages at most.
    #[must_use]
    pub fn listed(&self, (length, computed): (i64, i64), page_tokens: i64, held: i64) -> Listed {
        let held = held.min((length + page_tokens - 1).div_euclid(page_tokens)).max(0);
        let (mut sinks, mut lowest) = (0, 0);
        if self.window > 0 {
            sinks = (i64::from(self.sink) + page_tokens - 1) / page_tokens;
            let seen = (length - computed).max(0) - (i64::from(self.window) - 1);
            lowest = (seen.max(0) / page_tokens).max(sinks);
        }
        let count = held.min(sinks) + (held - lowest).max(0);
        Listed { sinks, lowest, count: count.min(i64::from(self.columns)) }
    }
}

/// Pages of a request: the first `sinks`, and those from `lowest` on, `count` in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    sinks: i64,
    lowest: i64,
    count: i64,
}

impl Listed {
    /// Indices in the request's row of the block table, ascending.
    pub fn pages(self) -> impl Iterator<Item = i64> {
        let Self { sinks, lowest, count } = self;
        (0..count).map(move |i| if i < sinks { i } else { lowest + i - sinks })
    }
}

impl StepTables<'_> {
    /// Proves that the shapes agree and that rows belong to requests in order.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let shape = &self.shape;
        shape.validate(self.entries.len())?;
        let (requests, rows, tables) = (shape.requests, shape.rows, shape.spans.len());
        ensure_len("lengths", requests, self.lengths.len())?;
        ensure_len("query_start", requests + 1, self.query_start.len())?;
        ensure_len("slot_mapping", rows, self.slot_mapping.len())?;
        ensure_len("positions", rows, self.positions.len())?;
        ensure_len("slots", rows.saturating_mul(tables), self.slots.len())?;
        ensure_len("offsets", requests.saturating_mul(tables) + 1, self.offsets.len())?;
        let extent = (requests - 1).saturating_mul(self.block_stride).saturating_add(shape.columns);
        ensure(
            shape.columns == 0 || self.blocks.len() >= extent,
            OpErrorKind::Shape,
            "blocks",
            || (format!("at least {extent} elements"), self.blocks.len()),
        )?;
        if let (Some(places), Some(pages)) = (self.places, shape.places) {
            ensure_len("places", tables.saturating_mul(pages), places.len())?;
        }
        let starts = self.query_start;
        let ordered = starts[0] == 0 && starts.is_sorted() && starts[requests] as usize <= rows;
        ensure(ordered, OpErrorKind::OutOfRange, "query_start", || {
            (format!("ascending numbers from 0 to at most {rows} (rows)"), format!("{starts:?}"))
        })
    }
}
