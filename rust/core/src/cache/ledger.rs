//! A scheduler's room beside a cache: what its requests take is counted, what is free is asked.

use crate::error::Error;
use crate::scheduler::{BlockLedger, LedgerGroup};

use super::KvCache;

impl KvCache {
    /// A room that counts pages as this cache would take them, for prompts that are computed in
    /// chunks of at most `chunk_tokens`. Before each plan it is to be told of
    /// [`Self::available_pages`].
    ///
    /// With one head group what it promises can be had. With several, free pages may lie in slabs
    /// of another group: see [`CacheRoom`](super::CacheRoom), which asks.
    ///
    /// # Errors
    /// `InvalidArgument` for chunks of no tokens.
    pub fn ledger(&self, chunk_tokens: usize) -> Result<BlockLedger, Error> {
        let common = &self.0;
        let pages = common.groups.pages().iter().zip(&common.windows);
        let group =
            |(&pages, &window): (&u32, &_)| LedgerGroup { block_pages: pages as usize, window };
        let groups: Vec<LedgerGroup> = pages.map(group).collect();
        let total = common.store.read().pool.slab_pages_total();
        let total = usize::try_from(total).unwrap_or(usize::MAX);
        BlockLedger::new(total, common.page_tokens(), chunk_tokens, &groups)
    }

    /// Pages that requests could have now: free, cached and held by nobody, or frozen and read by
    /// nobody.
    #[must_use]
    pub fn available_pages(&self) -> usize {
        let stored = self.0.store.read();
        let idle = stored.pool.idle_count() as u64 * self.0.row_pages();
        let held = stored.pool.held_pages().saturating_sub(idle);
        usize::try_from(stored.pool.slab_pages_total() - held).unwrap_or(usize::MAX)
    }
}
