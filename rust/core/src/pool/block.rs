//! Guards over sets of blocks: the type says what may be done, Drop gives everything back.
//!
//! A set, not one block, is guarded, so that a request of thousands of blocks takes the lock once.

use std::sync::Arc;

use crate::error::Error;
use crate::ids::BlockId;

use super::states::Evict;
use super::store::Store;

/// Blocks that this holder may write, unless a fork made it one owner of several.
pub struct WritableBlocks<I> {
    store: Arc<Store<I>>,
    blocks: Vec<BlockId>,
}

/// Blocks that are read and cannot be written.
pub struct SharedBlocks<I> {
    store: Arc<Store<I>>,
    blocks: Vec<BlockId>,
}

impl<I: Evict> WritableBlocks<I> {
    /// Allocates as many blocks of each group as `needs` says, all or nothing.
    ///
    /// # Errors
    /// `PoolFull`, with nothing changed.
    pub fn allocate(store: &Arc<Store<I>>, needs: &[usize]) -> Result<WritableBlocks<I>, Error> {
        let mut blocks = Vec::with_capacity(needs.iter().sum());
        let mut stored = store.lock();
        let stored = &mut *stored;
        stored.pool.allocate(needs, &mut stored.index, &mut blocks)?;
        Ok(WritableBlocks { store: Arc::clone(store), blocks })
    }
}

impl<I> WritableBlocks<I> {
    /// Wraps blocks that were allocated under the lock.
    pub(crate) fn adopt(store: &Arc<Store<I>>, blocks: Vec<BlockId>) -> WritableBlocks<I> {
        WritableBlocks { store: Arc::clone(store), blocks }
    }

    /// The blocks.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Adds blocks that were allocated under the lock.
    pub(crate) fn extend(&mut self, blocks: &[BlockId]) {
        self.blocks.extend_from_slice(blocks);
    }

    /// Takes some of the blocks out of the guard; they stay held, and whoever called gives them
    /// back under the lock.
    pub(crate) fn part_with(&mut self, given: &[BlockId]) -> Vec<BlockId> {
        part(&mut self.blocks, given)
    }

    /// Takes up to `count` blocks out of the guard; they stay held.
    pub(crate) fn take_last(&mut self, count: usize) -> Vec<BlockId> {
        self.blocks.split_off(self.blocks.len().saturating_sub(count))
    }

    /// A second owner of the same blocks: neither may write before it has copied.
    #[must_use]
    pub fn fork(&self) -> WritableBlocks<I> {
        self.store.lock().pool.hold_as_owner(&self.blocks);
        WritableBlocks { store: Arc::clone(&self.store), blocks: self.blocks.clone() }
    }

    /// Gives up the right to write.
    #[must_use]
    pub fn share(mut self) -> SharedBlocks<I> {
        let blocks = std::mem::take(&mut self.blocks);
        self.store.lock().pool.disown(&blocks);
        SharedBlocks { store: Arc::clone(&self.store), blocks }
    }

    /// Gives up the right to write some of the blocks; the others stay.
    #[must_use = "dropping the result releases the blocks"]
    pub fn share_some(&mut self, given: &[BlockId]) -> SharedBlocks<I> {
        let out = self.part_with(given);
        let given = WritableBlocks { store: Arc::clone(&self.store), blocks: out };
        given.share()
    }
}

impl<I> Drop for WritableBlocks<I> {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            self.store.lock().pool.release_owned(&self.blocks);
        }
    }
}

impl<I> SharedBlocks<I> {
    /// Wraps blocks that were held under the lock.
    pub(crate) fn adopt(store: &Arc<Store<I>>, blocks: Vec<BlockId>) -> SharedBlocks<I> {
        SharedBlocks { store: Arc::clone(store), blocks }
    }

    /// The blocks.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Adds blocks that are held under the lock.
    pub(crate) fn extend(&mut self, blocks: &[BlockId]) {
        self.blocks.extend_from_slice(blocks);
    }

    /// Takes some of the blocks out of the guard; they stay held, and whoever called gives them
    /// back under the lock.
    pub(crate) fn part_with(&mut self, given: &[BlockId]) -> Vec<BlockId> {
        part(&mut self.blocks, given)
    }

    /// Takes all blocks out of the guard; they stay held.
    pub(crate) fn take_all(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.blocks)
    }

    /// Takes the right to write, if nobody else names a block and no index does.
    ///
    /// # Errors
    /// The blocks themselves, still shared.
    pub fn claim(mut self) -> Result<WritableBlocks<I>, SharedBlocks<I>> {
        {
            let mut stored = self.store.lock();
            let alone = |block: &BlockId| {
                stored.pool.references(*block) == 1 && !stored.pool.is_indexed(*block)
            };
            if self.blocks.iter().all(alone) {
                stored.pool.own(&self.blocks);
            } else {
                drop(stored);
                return Err(self);
            }
        }
        let blocks = std::mem::take(&mut self.blocks);
        Ok(WritableBlocks { store: Arc::clone(&self.store), blocks })
    }
}

/// Moves the given blocks out of a list, as often as they stand there.
fn part(blocks: &mut Vec<BlockId>, given: &[BlockId]) -> Vec<BlockId> {
    let mut sorted = given.to_vec();
    sorted.sort_unstable();
    let given = |block: &BlockId| sorted.binary_search(block).is_ok();
    let (out, kept) = std::mem::take(blocks).into_iter().partition(given);
    *blocks = kept;
    out
}

impl<I> Clone for SharedBlocks<I> {
    fn clone(&self) -> SharedBlocks<I> {
        self.store.lock().pool.hold(&self.blocks);
        SharedBlocks { store: Arc::clone(&self.store), blocks: self.blocks.clone() }
    }
}

impl<I> Drop for SharedBlocks<I> {
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            self.store.lock().pool.release(&self.blocks);
        }
    }
}
