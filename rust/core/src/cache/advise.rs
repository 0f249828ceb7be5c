//! What a request's user knows of its KV, for the order in which cached blocks are given up.

use std::ops::Range;

use crate::error::Error;
use crate::pool::Advice;

use super::request::Request;

impl Request {
    /// Takes note of what is known of the positions of a range: in every table, of the blocks that
    /// hold any of them. It holds until a block's content goes, and for everybody who shares it;
    /// only [`Eviction::CostAware`](crate::pool::Eviction) makes use of it.
    ///
    /// # Errors
    /// `OutOfRange` unless the range lies inside [0, len).
    pub fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Error> {
        if range.start > range.end || range.end > self.len() {
            let expected = format!("a range inside [0, {})", self.len());
            let got = format!("[{}, {})", range.start, range.end);
            return Err(Error::out_of_range("advise", expected, got));
        }
        let page = self.shared.page_tokens();
        let blocks = range.start / page..range.end.div_ceil(page);
        let mut stored = self.shared.store.lock();
        for held in &self.holdings[..self.shared.groups.len()] {
            let known: Vec<_> = blocks.clone().filter_map(|b| held.table.block(b)).collect();
            stored.pool.advise(&known, advice);
        }
        Ok(())
    }
}
