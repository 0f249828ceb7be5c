//! What a namespace leaves behind: content that can still be found, and pages of freed blocks.

use crate::error::Error;

use super::KvCache;

impl KvCache {
    /// Evicts all that is cached of a namespace, or of all, in every regime; returns the blocks.
    /// What live requests and documents hold stays, and is cached as ever once they let go of it.
    #[must_use]
    pub fn forget(&self, namespace: Option<&str>) -> usize {
        let mut stored = self.0.store.lock();
        let state = &mut *stored;
        let index = &state.index;
        let blocks =
            state.pool.cached_blocks(|block| namespace.is_none_or(|name| index.is_of(block, name)));
        for &block in &blocks {
            // One may have gone with another before it.
            if state.pool.is_cached(block) {
                state.pool.evict(block, &mut state.index);
            }
        }
        blocks.len()
    }

    /// From now on notes which pages of blocks were freed, for [`Self::take_freed`].
    ///
    /// # Errors
    /// `OutOfMemory` where the books find no room.
    pub fn note_freed_pages(&self) -> Result<(), Error> {
        self.0.store.lock().pool.note_freed_pages()
    }

    /// Runs of pages, first and number, whose blocks were freed since the last call: what was in
    /// them is there until somebody overwrites it. Some may belong to requests again that have
    /// not written to them yet; whoever overwrites pages does so before these do.
    #[must_use]
    pub fn take_freed(&self) -> Vec<[i32; 2]> {
        self.0.store.lock().pool.take_freed()
    }
}
