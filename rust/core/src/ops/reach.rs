//! Which tokens each KV head of a layer reads, and where their pages lie.

use super::error::{OpError, OpErrorKind, ensure};

/// Entry tables and head rows of one layer whose heads do not all read the same.
///
/// Heads of one retention form a group that has blocks of its own, so a request has one entry
/// table per group, and a local head's table only lists what the head still sees (RedKnot, §4.3:
/// head segments). `entry_offsets` is then [B·R+1]: the entries of table r of request b are
/// `entry_offsets[b·R + r] .. entry_offsets[b·R + r + 1]`.
#[derive(Clone, Copy, Debug)]
pub struct Reach<'a> {
    /// R: entry tables of a request, at least 1. A layer need not read all of them.
    pub tables: usize,
    /// [G] rows `[table, rank, window, sink]`, window 0 for none; see [`HeadReach`].
    pub heads: &'a [[i32; 4]],
}

/// What one KV head reads: a row of a reach, decoded.
///
/// A key at position p is visible to a row at position i when `p ≤ i` and, with a window w,
/// `p > i − w` or `p < sink` (RedKnot, §4.2: the set W(i)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadReach {
    /// Which of a request's entry tables.
    pub table: usize,
    /// Its page in a block: the keys of slot 0 start `rank · head_stride` elements after the block.
    pub rank: usize,
    /// Latest keys that a row sees, itself included; at least 1.
    pub window: Option<u32>,
    /// Keys at the start of the sequence that a row sees besides; no matter without a window.
    pub sink: u32,
}

impl HeadReach {
    /// Decodes a row `[table, rank, window, sink]` that `validate()` accepted.
    #[must_use]
    pub fn new(row: [i32; 4]) -> Self {
        let [table, rank, window, sink] = row.map(i32::cast_unsigned);
        let window = (window != 0).then_some(window);
        Self { table: table as usize, rank: rank as usize, window, sink }
    }

    /// What a row at `position` sees.
    #[must_use]
    pub fn visible(&self, position: i32) -> Visible {
        Visible::new(position, self.window, self.sink)
    }
}

/// Positions that a row sees: `[0, sink)` and `[first, end)`, which do not touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// One past the last position seen at the start of the sequence.
    pub sink: i64,
    /// First position of the others.
    pub first: i64,
    /// One past the last position seen.
    pub end: i64,
}

impl Visible {
    /// What a row at `position` sees with the latest `window` keys and the first `sink`.
    #[must_use]
    pub fn new(position: i32, window: Option<u32>, sink: u32) -> Self {
        let end = i64::from(position) + 1;
        let first = window.map_or(0, |window| (end - i64::from(window)).max(0));
        let sink = i64::from(sink);
        if sink < first { Self { sink, first, end } } else { Self { sink: 0, first: 0, end } }
    }

    /// Whether the key at `position` is seen.
    #[must_use]
    pub fn contains(&self, position: i64) -> bool {
        position < self.sink || (self.first <= position && position < self.end)
    }
}

impl Reach<'_> {
    /// Checks the rows against G; pages are checked with the entries that lead to them.
    pub(crate) fn validate(&self, kv_heads: usize) -> Result<(), OpError> {
        ensure(self.tables > 0, OpErrorKind::Shape, "tables of reach", || ("at least 1", 0))?;
        let rows = self.heads.len();
        ensure(rows == kv_heads, OpErrorKind::Shape, "heads of reach", || {
            (format!("{kv_heads} rows, one a KV head"), rows)
        })?;
        for &[table, rank, window, sink] in self.heads {
            let known = table >= 0 && (table as usize) < self.tables;
            ensure(known, OpErrorKind::OutOfRange, "table of a head", || {
                (format!("a table from 0 to {}", self.tables - 1), table)
            })?;
            let numbers =
                [("rank of a head", rank), ("window of a head", window), ("sink of a head", sink)];
            for (what, number) in numbers {
                ensure(number >= 0, OpErrorKind::OutOfRange, what, || ("at least 0", number))?;
            }
        }
        Ok(())
    }
}
