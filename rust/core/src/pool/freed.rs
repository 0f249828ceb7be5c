//! Pages of blocks that went back to the pool and still hold what was written to them.

use crate::error::Error;
use crate::reserve::zeroed;

const BITS: usize = u64::BITS as usize;

/// A set of an arena's pages, taken out as runs.
pub(super) struct FreedPages {
    words: Vec<u64>,
    /// Words from the first to behind the last that may name a page.
    low: usize,
    high: usize,
}

impl FreedPages {
    /// None of so many pages.
    ///
    /// # Errors
    /// `OutOfMemory` where they find no room.
    pub(super) fn none_of(pages: u32) -> Result<FreedPages, Error> {
        let words = zeroed("pages of freed blocks", (pages as usize).div_ceil(BITS))?;
        Ok(FreedPages { low: words.len(), high: 0, words })
    }

    /// Notes `count` pages from `first` on.
    pub(super) fn note(&mut self, first: usize, count: usize) {
        let end = first + count;
        self.low = self.low.min(first / BITS);
        self.high = self.high.max(end.div_ceil(BITS));
        let mut page = first;
        while page < end {
            let (word, bit) = (page / BITS, page % BITS);
            let length = (BITS - bit).min(end - page);
            self.words[word] |= (u64::MAX >> (BITS - length)) << bit;
            page += length;
        }
    }

    /// All pages as runs of a first one and their number, in order; none are left.
    pub(super) fn take(&mut self) -> Vec<[i32; 2]> {
        let mut runs: Vec<[i32; 2]> = Vec::new();
        for word in self.low..self.high {
            let mut bits = std::mem::take(&mut self.words[word]);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                let length = (bits >> bit).trailing_ones();
                bits &= !((u64::MAX >> (u64::BITS - length)) << bit);
                let first = (word * BITS) as i32 + bit as i32;
                match runs.last_mut() {
                    Some([start, count]) if *start + *count == first => *count += length as i32,
                    _ => runs.push([first, length as i32]),
                }
            }
        }
        (self.low, self.high) = (self.words.len(), 0);
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::FreedPages;

    #[test]
    fn runs_go_over_words_and_are_taken_once() {
        let mut freed = FreedPages::none_of(300).unwrap();
        assert!(freed.take().is_empty());
        freed.note(60, 10);
        freed.note(70, 130);
        freed.note(65, 2);
        freed.note(299, 1);
        freed.note(0, 1);
        assert_eq!(freed.take(), [[0, 1], [60, 140], [299, 1]]);
        assert!(freed.take().is_empty());
        freed.note(128, 64);
        assert_eq!(freed.take(), [[128, 64]]);
    }

    #[test]
    fn any_sets_of_pages_come_back_as_they_were_noted() {
        let (mut freed, mut state) = (FreedPages::none_of(1000).unwrap(), 7_u64);
        for _ in 0..200 {
            let mut expected = [false; 1000];
            for _ in 0..5 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let first = (state >> 33) as usize % 1000;
                let count = ((state >> 20) as usize % 150).min(1000 - first);
                freed.note(first, count);
                expected[first..first + count].fill(true);
            }
            let mut found = [false; 1000];
            for [first, count] in freed.take() {
                found[first as usize..(first + count) as usize].fill(true);
            }
            assert_eq!(found, expected);
        }
    }
}
