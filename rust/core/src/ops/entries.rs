//! The KV a request reads: entries over a paged tensor.

use std::ops::Range;

use super::error::{OpError, OpErrorKind, ensure};
use super::geometry::PageGeometry;
use super::reach::{HeadReach, Reach};
use super::scales::KvScales;
use super::scoring::Scoring;

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
    /// Rows `[block, begin, end, position, delta]`; those of one table of one request are sorted
    /// by position and do not overlap. Gaps between them are positions that no row sees.
    pub entries: &'a [[i32; 5]],
    /// Tables, pages and windows of each KV head. `None`: one table a request, all heads read it,
    /// and the page of a head is where the geometry has that of (layer, head).
    pub reach: Option<Reach<'a>>,
    /// What the layer's stored numbers are multiplied by.
    pub scales: KvScales,
}

impl<'a, T> KvView<'a, T> {
    /// R: entry tables of a request.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.reach.map_or(1, |reach| reach.tables)
    }

    /// What a KV head reads; `rank` counts pages of our arena where there is no reach.
    ///
    /// # Panics
    /// If the layer has no such head.
    #[must_use]
    pub fn head(&self, head: usize, scoring: &Scoring<'_>) -> HeadReach {
        self.reach.map_or_else(
            || {
                let rank = self.layer * self.geometry.kv_heads + head;
                HeadReach { table: 0, rank, window: scoring.window, sink: 0 }
            },
            |reach| HeadReach::new(reach.heads[head]),
        )
    }

    /// Entries of one table of a request, as a range of `entries`.
    ///
    /// # Panics
    /// If `offsets` [B·R+1] has no such request.
    #[must_use]
    pub fn span(&self, offsets: &[i32], request: usize, table: usize) -> Range<usize> {
        let at = request * self.tables() + table;
        offsets[at] as usize..offsets[at + 1] as usize
    }

    /// First element of a key vector. Valid for indices that `validate()` accepted.
    ///
    /// # Panics
    /// If the layer has no such head.
    #[must_use]
    pub fn key_offset(&self, block: usize, head: usize, slot: usize) -> usize {
        match self.reach {
            None => self.geometry.key_offset(block, self.layer, head, slot),
            Some(reach) => {
                self.geometry.key_offset(block, 0, HeadReach::new(reach.heads[head]).rank, slot)
            }
        }
    }

    /// First element of a value vector. Valid for indices that `validate()` accepted.
    ///
    /// # Panics
    /// If the layer has no such head.
    #[must_use]
    pub fn value_offset(&self, block: usize, head: usize, slot: usize) -> usize {
        self.key_offset(block, head, slot) + self.geometry.value_offset
    }

    /// Checks geometry, entries and reach; `offsets` [B·R+1] splits the entries by request and
    /// table. With a reach, what is of tables that no head of the layer reads is not looked at:
    /// there may be anything, and their offsets may fall. Only the cache's length is looked at, so
    /// `T` may be `()` where the memory is elsewhere, such as on a device.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self, offsets: &[i32]) -> Result<(), OpError> {
        self.geometry.check_counts()?;
        ensure(self.layer < self.geometry.layers, OpErrorKind::OutOfRange, "layer", || {
            (format!("a layer below {}", self.geometry.layers), self.layer)
        })?;
        let tables = self.tables();
        match &self.reach {
            None => check_offsets("entry_offsets", offsets, self.entries.len())?,
            Some(reach) => {
                reach.validate(self.geometry.kv_heads)?;
                let whole = offsets.len() % tables == 1 % tables && !offsets.is_empty();
                ensure(whole, OpErrorKind::Shape, "entry_offsets", || {
                    (format!("one more than a multiple of {tables} (tables)"), offsets.len())
                })?;
            }
        }
        for table in self.tables_read() {
            for span in offsets.windows(2).skip(table).step_by(tables) {
                let entries = self.entries_in(span)?;
                entries.iter().try_for_each(|row| self.check_row(row))?;
                check_order(entries)?;
            }
        }
        self.check_pages(offsets)
    }

    /// The tables that some head reads, each once.
    fn tables_read(&self) -> Vec<usize> {
        let Some(reach) = self.reach else { return vec![0] };
        let mut read: Vec<usize> =
            reach.heads.iter().map(|&row| HeadReach::new(row).table).collect();
        read.sort_unstable();
        read.dedup();
        read
    }

    fn entries_in(&self, span: &[i32]) -> Result<&[[i32; 5]], OpError> {
        let ends = usize::try_from(span[0]).ok().zip(usize::try_from(span[1]).ok());
        let found = ends.and_then(|(start, end)| self.entries.get(start..end));
        found.ok_or_else(|| {
            let expected = format!("offsets that rise, up to {}", self.entries.len());
            OpError::new(OpErrorKind::Shape, "entry_offsets", expected, format!("{span:?}"))
        })
    }

    /// Checks that the pages which heads reach through their tables lie in the cache.
    fn check_pages(&self, offsets: &[i32]) -> Result<(), OpError> {
        let len = self.cache.len();
        let Some(reach) = self.reach else {
            let last = last_block(self.entries);
            return last.map_or(Ok(()), |block| self.geometry.check_inside(block, self.layer, len));
        };
        for (i, &[table, ..]) in reach.heads.iter().enumerate() {
            let of_table = |row: &&[i32; 4]| row[0] == table;
            if reach.heads[..i].iter().any(|row| of_table(&row)) {
                continue;
            }
            let spans = offsets.windows(2).skip(table as usize).step_by(reach.tables);
            let entries = |span: &[i32]| &self.entries[span[0] as usize..span[1] as usize];
            let last = spans.filter_map(|span| last_block(entries(span))).max();
            let rank = reach.heads.iter().filter(of_table).map(|row| row[1]).max();
            if let (Some(block), Some(rank)) = (last, rank) {
                self.geometry.check_page(block, rank as usize, len)?;
            }
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

fn last_block(entries: &[[i32; 5]]) -> Option<usize> {
    entries.iter().map(|row| row[0] as usize).max()
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

/// Checks that `offsets` [N+1] splits `[0, len)` into N ranges.
///
/// # Errors
/// `Shape` naming `what`.
pub fn check_offsets(what: &'static str, offsets: &[i32], len: usize) -> Result<(), OpError> {
    let ends = (offsets.first(), offsets.last());
    let whole = ends.0 == Some(&0) && ends.1.is_some_and(|&end| end as usize == len);
    ensure(whole, OpErrorKind::Shape, what, || {
        (format!("offsets from 0 to {len}"), format!("{:?}", (ends.0, ends.1)))
    })?;
    let rising = offsets.windows(2).all(|pair| pair[0] <= pair[1]);
    ensure(rising, OpErrorKind::Shape, what, || ("offsets that never fall", "falling offsets"))
}
