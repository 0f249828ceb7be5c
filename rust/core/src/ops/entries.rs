//! The KV a request reads: entries over a paged tensor.

use super::error::{OpError, OpErrorKind, ensure};
use super::geometry::PageGeometry;

/// One row of an entry table, decoded.
///
/// Slots `[begin, end)` of `block` hold the tokens at request positions
/// `position .. position + (end − begin)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Block number.
    pub block: usize,
    /// First slot.
    pub begin: usize,
    /// One past the last slot.
    pub end: usize,
    /// Request position of slot `begin`.
    pub position: i64,
    /// Request position − position at which the stored keys were rotated.
    pub delta: i32,
}

impl Entry {
    /// Decodes a row `[block, begin, end, position, delta]` that `validate()` accepted.
    #[must_use]
    pub fn new(row: [i32; 5]) -> Self {
        let [block, begin, end, position, delta] = row;
        Self {
            block: block as usize,
            begin: begin as usize,
            end: end as usize,
            position: i64::from(position),
            delta,
        }
    }

    /// Tokens of the entry.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.end - self.begin
    }

    /// One past the position of the last token.
    #[must_use]
    pub fn end_position(&self) -> i64 {
        self.position + self.tokens() as i64
    }
}

/// The keys and values that a call may read, of one layer.
#[derive(Clone, Copy, Debug)]
pub struct KvView<'a, T> {
    /// The whole paged tensor.
    pub cache: &'a [T],
    /// Its strides.
    pub geometry: PageGeometry,
    /// The layer read.
    pub layer: usize,
    /// Rows `[block, begin, end, position, delta]`; those of one request are sorted by position
    /// and do not overlap. Gaps between them are positions that no row sees.
    pub entries: &'a [[i32; 5]],
}

impl<T> KvView<'_, T> {
    /// Checks geometry and entries; `offsets` [B+1] splits the entries by request.
    pub(crate) fn validate(&self, offsets: &[i32]) -> Result<(), OpError> {
        self.geometry.check_counts()?;
        ensure(self.layer < self.geometry.layers, OpErrorKind::OutOfRange, "layer", || {
            (format!("a layer below {}", self.geometry.layers), self.layer)
        })?;
        check_offsets("entry_offsets", offsets, self.entries.len())?;
        let mut last_block = 0;
        for row in self.entries {
            self.check_row(row)?;
            last_block = last_block.max(row[0]);
        }
        if !self.entries.is_empty() {
            self.geometry.check_reach(last_block as usize, self.layer, self.cache.len())?;
        }
        for span in offsets.windows(2) {
            check_order(&self.entries[span[0] as usize..span[1] as usize])?;
        }
        Ok(())
    }

    fn check_row(&self, &[block, begin, end, position, _]: &[i32; 5]) -> Result<(), OpError> {
        let slots = self.geometry.page_tokens as i64;
        ensure(block >= 0, OpErrorKind::OutOfRange, "entry block", || ("at least 0", block))?;
        let in_page = 0 <= begin && begin < end && i64::from(end) <= slots;
        ensure(in_page, OpErrorKind::OutOfRange, "entry slots", || {
            (format!("0 ≤ begin < end ≤ {slots}"), format!("[{begin}, {end})"))
        })?;
        let fits = position >= 0 && position.checked_add(end - begin).is_some();
        ensure(fits, OpErrorKind::OutOfRange, "entry position", || {
            ("positions from 0 to 2^31 − 1", position)
        })
    }
}

fn check_order(entries: &[[i32; 5]]) -> Result<(), OpError> {
    let mut free_from = 0;
    for &[_, begin, end, position, _] in entries {
        ensure(position >= free_from, OpErrorKind::Overlap, "entry position", || {
            (format!("at least {free_from}, the end of the entry before"), position)
        })?;
        free_from = position + (end - begin);
    }
    Ok(())
}

/// Checks that `offsets` [B+1] splits `[0, len)` into B ranges.
pub(crate) fn check_offsets(
    what: &'static str,
    offsets: &[i32],
    len: usize,
) -> Result<(), OpError> {
    let ends = (offsets.first(), offsets.last());
    let whole = ends.0 == Some(&0) && ends.1.is_some_and(|&end| end as usize == len);
    ensure(whole, OpErrorKind::Shape, what, || {
        (format!("offsets from 0 to {len}"), format!("{:?}", (ends.0, ends.1)))
    })?;
    let rising = offsets.windows(2).all(|pair| pair[0] <= pair[1]);
    ensure(rising, OpErrorKind::Shape, what, || ("offsets that never fall", "falling offsets"))
}
