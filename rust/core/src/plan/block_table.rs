//! Where a request's tokens lie in one head group: private and prefix blocks on its own grid, and
//! ranges of donors between.
//!
//! Grid block b holds positions [bP, (b+1)P). A donor range (share mode) covers positions whose
//! KV is read from a block on the donor's grid; it takes precedence over the grid block. A window
//! group has no block where it keeps nothing. A grid block whose KV lies in the host's memory has
//! none either, nor a donor range, and in place of its page −1 − its number there.

use std::ops::Range;

use crate::ids::BlockId;

/// Positions whose KV lies in a donor block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DonorRange {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Donor slot of `start`.
    pub(crate) begin: u32,
    pub(crate) delta: i32,
    pub(crate) donor: BlockId,
    /// The donor's page number.
    pub(crate) page: i32,
}

impl DonorRange {
    /// The part inside a range that the donor range meets.
    pub(crate) fn clip(self, range: &Range<usize>) -> DonorRange {
        let start = self.start.max(range.start);
        let begin = self.begin + (start - self.start) as u32;
        DonorRange { start, end: self.end.min(range.end), begin, ..self }
    }
}

/// Where the positions of one entry lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listed {
    /// In a grid block.
    Grid(usize),
    /// In a donor range, by its number in order.
    Donor(usize),
}

/// The block table of one request in one head group.
#[derive(Clone, Default)]
pub(crate) struct BlockTable {
    page_tokens: usize,
    blocks: Vec<BlockId>,
    pages: Vec<i32>,
    donors: Vec<DonorRange>,
}

impl BlockTable {
    pub(crate) fn new(page_tokens: usize) -> BlockTable {
        BlockTable { page_tokens, ..BlockTable::default() }
    }

    /// Grid blocks, the absent ones included.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn span(&self, b: usize) -> Range<usize> {
        b * self.page_tokens..(b + 1) * self.page_tokens
    }

    /// Appends a grid block.
    pub(crate) fn push(&mut self, block: BlockId, page: i32) {
        self.blocks.push(block);
        self.pages.push(page);
    }

    /// Appends grid blocks and their pages.
    pub(crate) fn extend(&mut self, blocks: impl ExactSizeIterator<Item = (BlockId, i32)>) {
        self.blocks.reserve(blocks.len());
        self.pages.reserve(blocks.len());
        blocks.for_each(|(block, page)| self.push(block, page));
    }

    /// Appends absent grid blocks up to a number of all.
    pub(crate) fn grow(&mut self, len: usize) {
        self.blocks.resize(len.max(self.len()), BlockId::NONE);
        self.pages.resize(self.len(), 0);
    }

    /// Keeps the first grid blocks; returns the others that are not absent.
    pub(crate) fn cut(&mut self, keep: usize) -> Vec<BlockId> {
        let gone = self.blocks.split_off(keep.min(self.blocks.len()));
        self.pages.truncate(self.blocks.len());
        gone.into_iter().filter(|block| block.is_some()).collect()
    }

    /// Puts another block in place of a grid block.
    pub(crate) fn set(&mut self, b: usize, block: BlockId, page: i32) {
        (self.blocks[b], self.pages[b]) = (block, page);
    }

    /// Takes a grid block out; none if it is absent.
    pub(crate) fn take(&mut self, b: usize) -> Option<BlockId> {
        let block = std::mem::replace(&mut self.blocks[b], BlockId::NONE);
        block.is_some().then_some(block)
    }

    /// A grid block; none if it is absent.
    pub(crate) fn block(&self, b: usize) -> Option<BlockId> {
        self.blocks.get(b).copied().filter(|block| block.is_some())
    }

    /// A grid block of which no part is read from a donor.
    pub(crate) fn own(&self, b: usize) -> Option<BlockId> {
        let covered = || self.donors_in(self.span(b)).next().is_some();
        self.block(b).filter(|_| self.donors.is_empty() || !covered())
    }

    pub(crate) fn page(&self, b: usize) -> i32 {
        self.pages[b]
    }

    /// Whether positions of a range that lies in grid block `b` have neither block nor donor.
    pub(crate) fn lacks(&self, b: usize, range: &Range<usize>) -> bool {
        let mut at = range.start;
        for donor in self.donors_in(range.clone()).take_while(|_| self.block(b).is_none()) {
            if donor.start > at {
                return true;
            }
            at = donor.end;
        }
        self.block(b).is_none() && at < range.end
    }

    /// Puts another block in place of a donor range's, or of what stood for it.
    pub(crate) fn set_donor(&mut self, number: usize, donor: BlockId, page: i32) {
        (self.donors[number].donor, self.donors[number].page) = (donor, page);
    }

    /// Appends a donor range; they come in order of position.
    pub(crate) fn push_donor(&mut self, donor: DonorRange) {
        self.donors.push(donor);
    }

    /// Donor ranges in order of position.
    pub(crate) fn donors(&self) -> &[DonorRange] {
        &self.donors
    }

    /// The donor ranges that meet a range, clipped to it.
    pub(crate) fn donors_in(&self, range: Range<usize>) -> impl Iterator<Item = DonorRange> + '_ {
        donors_in(&self.donors, range)
    }

    /// Ends donor coverage of some ranges, which are in order and do not meet.
    pub(crate) fn uncover(&mut self, ranges: &[Range<usize>]) {
        let mut kept = Vec::with_capacity(self.donors.len() + ranges.len());
        for donor in &self.donors {
            let first = ranges.partition_point(|range| range.end <= donor.start);
            let mut at = donor.start;
            for range in ranges[first..].iter().take_while(|range| range.start < donor.end) {
                if at < range.start {
                    kept.push(donor.clip(&(at..range.start)));
                }
                at = range.end;
            }
            if at < donor.end {
                kept.push(donor.clip(&(at..donor.end)));
            }
        }
        self.donors = kept;
    }

    /// `entries` rows `[block, begin, end, position, delta]` of what is stored of [0, len).
    pub(crate) fn entries(&self, len: usize) -> Vec<[i32; 5]> {
        let mut entries = Vec::with_capacity(self.len() + 2 * self.donors.len());
        self.each_listed(len, |listed, range| {
            let (page, begin, delta) = match listed {
                Listed::Grid(b) => (self.page(b), range.start - b * self.page_tokens, 0),
                Listed::Donor(number) => {
                    let donor = self.donors[number];
                    (donor.page, donor.begin as usize, donor.delta)
                }
            };
            let end = begin + range.len();
            entries.push([page, begin as i32, end as i32, range.start as i32, delta]);
        });
        entries
    }

    /// Where what [`Self::entries`] lists lies, in the same order, and the positions of each.
    pub(crate) fn listed(&self, len: usize) -> Vec<(Listed, Range<usize>)> {
        let mut all = Vec::with_capacity(self.len() + 2 * self.donors.len());
        self.each_listed(len, |listed, range| all.push((listed, range)));
        all
    }

    fn each_listed(&self, len: usize, mut each: impl FnMut(Listed, Range<usize>)) {
        let mut at = 0;
        for (number, donor) in self.donors_in(0..len).enumerate() {
            self.each_on_grid(at..donor.start, &mut each);
            each(Listed::Donor(number), donor.start..donor.end);
            at = donor.end;
        }
        self.each_on_grid(at..len, &mut each);
    }

    /// The entry of position `len` − 1, which no donor covers, as [`Self::entries`] has it last;
    /// none where its block is absent.
    pub(crate) fn newest(&self, len: usize) -> Option<[i32; 5]> {
        let b = len.checked_sub(1)? / self.page_tokens;
        self.block(b)?;
        let first = b * self.page_tokens;
        let start = self.donors.last().map_or(first, |donor| donor.end.max(first));
        let [begin, end] = [start - first, len - first].map(|slot| slot as i32);
        Some([self.page(b), begin, end, start as i32, 0])
    }

    fn each_on_grid(&self, range: Range<usize>, each: &mut impl FnMut(Listed, Range<usize>)) {
        let mut at = range.start;
        while at < range.end {
            let b = at / self.page_tokens;
            let end = range.end.min((b + 1) * self.page_tokens);
            if self.block(b).is_some() || self.page(b) < 0 {
                each(Listed::Grid(b), at..end);
            }
            at = end;
        }
    }
}

/// Those of sorted donor ranges that meet a range, clipped to it.
pub(crate) fn donors_in(
    donors: &[DonorRange],
    range: Range<usize>,
) -> impl Iterator<Item = DonorRange> + '_ {
    let first = donors.partition_point(|donor| donor.end <= range.start);
    let meeting = donors[first..].iter().take_while({
        let end = range.end;
        move |donor| donor.start < end
    });
    meeting.map(move |donor| donor.clip(&range))
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;

    fn donor(start: usize, end: usize, begin: u32, page: i32) -> DonorRange {
        DonorRange { start, end, begin, delta: -7, donor: BlockId::new(page as u32), page }
    }

    fn table() -> BlockTable {
        let mut table = BlockTable::new(4);
        table.push(BlockId::new(0), 100);
        table.grow(2);
        table.push(BlockId::new(2), 102);
        table.push_donor(donor(2, 5, 1, 50));
        table.push_donor(donor(5, 9, 0, 60));
        table
    }

    #[test]
    fn entries_interleave_grid_and_donors() {
        let expected = [[100, 0, 2, 0, 0], [50, 1, 4, 2, -7], [60, 0, 4, 5, -7], [102, 1, 3, 9, 0]];
        assert_eq!(table().entries(11), expected);
        assert_eq!(table().entries(3), [[100, 0, 2, 0, 0], [50, 1, 2, 2, -7]]);
        assert!(table().entries(0).is_empty());
        assert_eq!(table().newest(11), Some([102, 1, 3, 9, 0]));
        assert_eq!(table().newest(12), Some([102, 1, 4, 9, 0]));
        assert_eq!(table().newest(13), None);
        assert_eq!(table().newest(0), None);
    }

    #[test]
    fn what_is_absent_is_not_read() {
        let mut table = table();
        assert!(!table.lacks(1, &(4..8)));
        table.uncover(slice::from_ref(&(4..5)));
        assert!(table.lacks(1, &(4..8)));
        assert!(!table.lacks(1, &(5..8)));
        assert_eq!(table.take(0), Some(BlockId::new(0)));
        assert_eq!(table.take(0), None);
        assert_eq!(table.entries(6), [[50, 1, 3, 2, -7], [60, 0, 1, 5, -7]]);
    }

    #[test]
    fn uncovering_a_block_splits_donor_ranges() {
        let mut table = table();
        table.uncover(slice::from_ref(&(4..8)));
        let left: Vec<_> = table.donors_in(0..12).map(|w| (w.start, w.end, w.begin)).collect();
        assert_eq!(left, [(2, 4, 1), (8, 9, 3)]);
    }

    #[test]
    fn uncovering_several_ranges_is_uncovering_each() {
        let ranges: Vec<Range<usize>> = vec![0..1, 3..4, 4..6, 8..20];
        let (mut at_once, mut each) = (table(), table());
        at_once.uncover(&ranges);
        ranges.iter().for_each(|range| each.uncover(slice::from_ref(range)));
        assert_eq!(at_once.donors(), each.donors());
        let left: Vec<_> = at_once.donors().iter().map(|w| (w.start, w.end, w.begin)).collect();
        assert_eq!(left, [(2, 3, 1), (6, 8, 1)]);
        at_once.uncover(&[]);
        assert_eq!(at_once.donors(), each.donors());
    }
}
