//! Where a request's tokens lie: private and prefix blocks on its own grid, donor windows between.
//!
//! Grid block b holds positions [bP, (b+1)P). A donor window (share mode) covers positions whose
//! KV is read from a block on the donor's grid; it takes precedence over the grid block.

use std::ops::Range;

use crate::ids::BlockId;

/// Positions that are read from a donor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Donor slot of `start`.
    pub(crate) begin: u32,
    pub(crate) delta: i32,
    /// Where the donor's page numbers stand, one a group.
    pub(crate) donor: usize,
}

/// The block table of one request over all head groups.
#[derive(Clone, Default)]
pub(crate) struct BlockTable {
    page_tokens: usize,
    groups: usize,
    blocks: Vec<BlockId>,
    pages: Vec<i32>,
    windows: Vec<Window>,
    donor_pages: Vec<i32>,
}

impl BlockTable {
    pub(crate) fn new(page_tokens: usize, groups: usize) -> BlockTable {
        BlockTable {
            page_tokens,
            groups,
            blocks: Vec::new(),
            pages: Vec::new(),
            windows: Vec::new(),
            donor_pages: Vec::new(),
        }
    }

    /// Grid blocks, the absent ones included.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len() / self.groups
    }

    /// Appends a grid block; `None` where donor windows cover all of it.
    pub(crate) fn push(&mut self, row: Option<&[BlockId]>, page: impl Fn(BlockId) -> i32) {
        match row {
            Some(row) => {
                self.blocks.extend_from_slice(row);
                self.pages.extend(row.iter().map(|&block| page(block)));
            }
            None => {
                let size = self.blocks.len() + self.groups;
                self.blocks.resize(size, BlockId::NONE);
                self.pages.resize(size, 0);
            }
        }
    }

    /// Puts other blocks in place of a grid block.
    pub(crate) fn replace(&mut self, b: usize, row: &[BlockId], page: impl Fn(BlockId) -> i32) {
        let at = b * self.groups;
        for (group, &block) in row.iter().enumerate() {
            self.blocks[at + group] = block;
            self.pages[at + group] = page(block);
        }
    }

    /// The blocks of a grid block, one a group; none if donors cover all of it.
    pub(crate) fn row(&self, b: usize) -> Option<&[BlockId]> {
        let row = self.blocks.get(b * self.groups..(b + 1) * self.groups)?;
        row[0].is_some().then_some(row)
    }

    /// The blocks of a grid block of which no part is read from a donor.
    pub(crate) fn own(&self, b: usize) -> Option<&[BlockId]> {
        let span = b * self.page_tokens..(b + 1) * self.page_tokens;
        self.row(b).filter(|_| self.windows_in(span).next().is_none())
    }

    pub(crate) fn page(&self, b: usize, group: usize) -> i32 {
        self.pages[b * self.groups + group]
    }

    /// Appends a donor window; windows come in order of position.
    pub(crate) fn push_window(&mut self, window: Window, pages: &[i32]) {
        self.windows.push(Window { donor: self.donor_pages.len(), ..window });
        self.donor_pages.extend_from_slice(pages);
    }

    /// The donor windows that meet a range, clipped to it.
    pub(crate) fn windows_in(&self, range: Range<usize>) -> impl Iterator<Item = Window> + '_ {
        let first = self.windows.partition_point(|window| window.end <= range.start);
        let meeting = self.windows[first..].iter().take_while(move |w| w.start < range.end);
        meeting.map(move |window| {
            let start = window.start.max(range.start);
            let begin = window.begin + (start - window.start) as u32;
            Window { start, end: window.end.min(range.end), begin, ..*window }
        })
    }

    pub(crate) fn donor_page(&self, window: &Window, group: usize) -> i32 {
        self.donor_pages[window.donor + group]
    }

    /// Ends donor coverage of a range.
    pub(crate) fn uncover(&mut self, range: &Range<usize>) {
        let mut kept = Vec::with_capacity(self.windows.len() + 1);
        for window in &self.windows {
            if window.end <= range.start || window.start >= range.end {
                kept.push(*window);
                continue;
            }
            if window.start < range.start {
                kept.push(Window { end: range.start, ..*window });
            }
            if window.end > range.end {
                let begin = window.begin + (range.end - window.start) as u32;
                kept.push(Window { start: range.end, begin, ..*window });
            }
        }
        self.windows = kept;
    }

    /// `entries` rows `[block, begin, end, position, delta]` of a group over positions [0, len).
    pub(crate) fn entries(&self, len: usize, group: usize) -> Vec<[i32; 5]> {
        let mut entries = Vec::with_capacity(self.len() + 2 * self.windows.len());
        let mut at = 0;
        for window in self.windows_in(0..len) {
            self.grid_entries(at..window.start, group, &mut entries);
            entries.push([
                self.donor_page(&window, group),
                window.begin as i32,
                window.begin as i32 + (window.end - window.start) as i32,
                window.start as i32,
                window.delta,
            ]);
            at = window.end;
        }
        self.grid_entries(at..len, group, &mut entries);
        entries
    }

    fn grid_entries(&self, range: Range<usize>, group: usize, entries: &mut Vec<[i32; 5]>) {
        let mut at = range.start;
        while at < range.end {
            let b = at / self.page_tokens;
            let end = range.end.min((b + 1) * self.page_tokens);
            let first = b * self.page_tokens;
            let page = self.page(b, group);
            entries.push([page, (at - first) as i32, (end - first) as i32, at as i32, 0]);
            at = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(block: BlockId) -> i32 {
        100 + block.index() as i32
    }

    fn table() -> BlockTable {
        let mut table = BlockTable::new(4, 1);
        table.push(Some(&[BlockId::new(0)]), page);
        table.push(None, page);
        table.push(Some(&[BlockId::new(2)]), page);
        let window = Window { start: 2, end: 5, begin: 1, delta: -7, donor: 0 };
        table.push_window(window, &[50]);
        table.push_window(Window { start: 5, end: 9, begin: 0, delta: -7, donor: 0 }, &[60]);
        table
    }

    #[test]
    fn entries_interleave_grid_and_donors() {
        let expected = [[100, 0, 2, 0, 0], [50, 1, 4, 2, -7], [60, 0, 4, 5, -7], [102, 1, 3, 9, 0]];
        assert_eq!(table().entries(11, 0), expected);
        assert_eq!(table().entries(3, 0), [[100, 0, 2, 0, 0], [50, 1, 2, 2, -7]]);
        assert!(table().entries(0, 0).is_empty());
    }

    #[test]
    fn uncovering_a_block_splits_windows() {
        let mut table = table();
        table.uncover(&(4..8));
        let left: Vec<_> = table.windows_in(0..12).map(|w| (w.start, w.end, w.begin)).collect();
        assert_eq!(left, [(2, 4, 1), (8, 9, 3)]);
    }
}
