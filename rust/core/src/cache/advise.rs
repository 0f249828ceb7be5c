//! What a request's user knows of its KV, for the order in which cached blocks are given up.

use std::ops::Range;

use crate::content::PrefixMatch;
use crate::error::Error;
use crate::pool::Advice;

use super::KvCache;
use super::request::Request;

impl KvCache {
    /// Takes note of what is known of a range of a text, as far as the longest exact prefix that is
    /// cached of the whole text goes, in every head group. Returns its tokens; of the blocks that
    /// the range begins and ends in, all are meant.
    pub fn advise(
        &self,
        tokens: &[u32],
        range: Range<usize>,
        (namespace, regime): (&str, u64),
        advice: Advice,
    ) -> usize {
        let mut stored = self.0.store.lock();
        let state = &mut *stored;
        let Some(scope) = state.index.scope(namespace, regime) else { return 0 };
        let mut found = Vec::with_capacity(tokens.len() / self.0.page_tokens() + 1);
        let PrefixMatch { partial, .. } = state.index.match_prefix(scope, tokens, &mut found);
        let page = self.0.page_tokens();
        let cached = found.len() * page + partial.map_or(0, |(_, tokens)| tokens);
        found.extend(partial.map(|(content, _)| content));
        let Range { start, end } = range.start..range.end.min(cached);
        if start >= end {
            return 0;
        }
        found.truncate(end.div_ceil(page));
        // The last block first: of equal ones a tail is given up before what it stands behind.
        for content in found.into_iter().skip(start / page).rev() {
            let row = state.index.row(content).iter().copied();
            let known: Vec<_> = row.filter(|block| block.is_some()).collect();
            state.pool.advise(&known, advice);
        }
        end - start
    }
}

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
        let page = self.common.page_tokens();
        let blocks = range.start / page..range.end.div_ceil(page);
        let mut stored = self.common.store.lock();
        for held in &self.holdings[..self.common.groups.len()] {
            let known: Vec<_> = blocks.clone().filter_map(|b| held.table.block(b)).collect();
            stored.pool.advise(&known, advice);
        }
        Ok(())
    }
}
