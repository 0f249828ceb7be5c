//! Params of `gather_entries`.

use super::entries::check_offsets;
use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_size};
use super::reach::{HeadReach, Reach};

/// The pages that B requests selected for each of G heads, out of the tables that these list, as
/// tables of their own: what `attend_decode` reads of them.
///
/// Each (request, head) has room for K entries, one behind the other. So it has two tables: its
/// entries, and the room behind them, which nobody reads.
#[derive(Debug)]
pub struct GatherEntries<'a> {
    /// [B, G, K]: indices of entries in the head's table, of which the first `selected` count.
    pub pages: &'a [i32],
    /// K.
    pub most: usize,
    /// [B, G]: from 0 to K.
    pub selected: &'a [i32],
    /// G, at least 1.
    pub heads: usize,
    /// Rows `[block, begin, end, position, delta]`.
    pub entries: &'a [[i32; 5]],
    /// [B+1]: entries of request b; with a reach [B·R+1], of request b and table r at b·R + r.
    pub entry_offsets: &'a [i32],
    /// Which table each head lists, where there are several; pages and windows do not matter.
    pub reach: Option<Reach<'a>>,
    /// [B·G·K]: what is selected of row (b, g) from (b·G + g)·K on, [`NO_ENTRY`] behind it.
    pub gathered: &'a mut [[i32; 5]],
    /// [2·B·G + 1]: the table of (b, g) is at 2·(b·G + g).
    pub offsets: &'a mut [i32],
}

/// An entry outside any cache: it covers no token.
pub const NO_ENTRY: [i32; 5] = [-1, 0, 0, i32::MAX, 0];

/// Proves that B requests of G heads fit the offsets and the numbers of entries that they give.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_gathered(
    (requests, heads, most): (usize, usize, usize),
    ends: usize,
    reach: Option<Reach<'_>>,
) -> Result<(), OpError> {
    ensure(heads > 0, OpErrorKind::Shape, "heads of pages", || ("at least 1", heads))?;
    if let Some(reach) = reach {
        reach.validate(heads)?;
    }
    let tables = reach.map_or(1, |reach| reach.tables);
    let needed = requests.checked_mul(tables).and_then(|ends| ends.checked_add(1));
    ensure_len("entry_offsets", needed.unwrap_or(usize::MAX), ends)?;
    let limit = i32::MAX.unsigned_abs() as usize;
    let entries = requests.checked_mul(heads).and_then(|rows| rows.checked_mul(most));
    ensure(entries.is_some_and(|n| n <= limit), OpErrorKind::OutOfRange, "width of pages", || {
        let rows = requests.saturating_mul(heads);
        (format!("at most {limit} entries of {rows} tables"), most)
    })
}

impl GatherEntries<'_> {
    /// Which of a request's tables a head lists.
    #[must_use]
    pub fn table(&self, head: usize) -> usize {
        self.reach.map_or(0, |reach| HeadReach::new(reach.heads[head]).table)
    }

    /// R: tables of a request.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.reach.map_or(1, |reach| reach.tables)
    }

    /// Proves that every index is that of an entry and that the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let (heads, most, offsets) = (self.heads, self.most, self.entry_offsets);
        let requests = self.selected.len() / heads.max(1);
        ensure_size("selected", &[requests, heads], self.selected.len())?;
        validate_gathered((requests, heads, most), offsets.len(), self.reach)?;
        ensure_size("pages", &[requests, heads, most], self.pages.len())?;
        ensure_size("gathered", &[requests, heads, most], self.gathered.len())?;
        ensure_len("offsets", 2 * requests * heads + 1, self.offsets.len())?;
        if self.reach.is_none() {
            check_offsets("entry_offsets", offsets, self.entries.len())?;
        }
        for (row, &selected) in self.selected.iter().enumerate() {
            let at = row / heads * self.tables() + self.table(row % heads);
            let ends = usize::try_from(offsets[at]).ok().zip(usize::try_from(offsets[at + 1]).ok());
            let listed = ends.and_then(|(from, to)| self.entries.get(from..to));
            let listed = listed.ok_or_else(|| {
                let expected = format!("offsets that rise, up to {}", self.entries.len());
                let got = format!("{:?}", (offsets[at], offsets[at + 1]));
                OpError::new(OpErrorKind::Shape, "entry_offsets", expected, got)
            })?;
            let count = usize::try_from(selected).ok().filter(|&count| count <= most);
            let count = count.ok_or_else(|| {
                let expected = format!("numbers from 0 to {most}");
                OpError::new(OpErrorKind::OutOfRange, "selected", expected, selected)
            })?;
            let of_row = &self.pages[row * most..][..count];
            let known = |&page: &i32| usize::try_from(page).is_ok_and(|page| page < listed.len());
            if let Some(page) = of_row.iter().find(|&page| !known(page)) {
                let expected = format!("indices below {} (entries of the table)", listed.len());
                return Err(OpError::new(OpErrorKind::OutOfRange, "pages", expected, page));
            }
        }
        Ok(())
    }
}
