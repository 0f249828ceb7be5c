//! Blocks that holders give back: the last one frees a block or has it cached.

use crate::ids::BlockId;

use super::blocks::Pool;
use super::states::{Block, BlockState};

impl Pool {
    /// Removes a holder of each block. The last one frees the block, or caches it if it is
    /// indexed: last block first, so that a tail is evicted before its prefix.
    pub fn release(&mut self, blocks: &[BlockId]) {
        self.release_from(blocks, 0);
    }

    /// The same of a holder that is an owner of each block.
    pub(super) fn release_owned(&mut self, blocks: &[BlockId]) {
        self.release_from(blocks, 1);
    }

    #[inline]
    fn release_from(&mut self, blocks: &[BlockId], owners: u32) {
        match blocks {
            [block] => self.release_one(*block, owners),
            _ => self.release_row(blocks, owners),
        }
    }

    fn release_row(&mut self, blocks: &[BlockId], owners: u32) {
        let mut left = blocks.len();
        while left > 0 {
            if self.is_freed_by_its_release(blocks[left - 1]) {
                left = self.free_run(&blocks[..left], owners);
            } else {
                left -= 1;
                self.release_one(blocks[left], owners);
            }
        }
    }

    /// Whether a block has one holder and nobody could find it.
    fn is_freed_by_its_release(&self, block: BlockId) -> bool {
        let entry = &self.blocks[block.index()];
        entry.state == BlockState::Held(1) && !entry.indexed
    }

    /// Frees the blocks at the end of a row whose only holder goes and that nobody could find, as
    /// far as they are of one slab, whose books then change once; returns how many are left.
    fn free_run(&mut self, blocks: &[BlockId], owners: u32) -> usize {
        let Block { slab, group, .. } = self.blocks[blocks[blocks.len() - 1].index()];
        let mut left = blocks.len();
        for &block in blocks.iter().rev() {
            let entry = &mut self.blocks[block.index()];
            if entry.state != BlockState::Held(1) || entry.indexed || entry.slab != slab {
                break;
            }
            entry.state = BlockState::Free;
            entry.owners -= owners;
            left -= 1;
        }
        let freed = &blocks[left..];
        let pool = &mut self.groups[group.index()];
        pool.held -= freed.len();
        pool.free += freed.len();
        self.slabs[usize::from(slab)].free.extend(freed.iter().rev());
        if let Some(pages) = &mut self.freed {
            let count = pool.pages as usize;
            freed.iter().for_each(|b| pages.note(self.pages[b.index()] as usize, count));
        }
        left
    }

    #[inline]
    fn release_one(&mut self, block: BlockId, owners: u32) {
        let entry = &mut self.blocks[block.index()];
        entry.owners -= owners;
        match entry.state {
            BlockState::Held(1) => {
                let pool = &mut self.groups[entry.group.index()];
                let slab = &mut self.slabs[usize::from(entry.slab)];
                pool.held -= 1;
                if entry.indexed {
                    entry.state = BlockState::Cached;
                    self.order.enter(entry.group, block);
                    pool.cached += 1;
                    slab.cached += 1;
                } else {
                    entry.state = BlockState::Free;
                    slab.free.push(block);
                    pool.free += 1;
                    self.note_freed(block);
                }
            }
            BlockState::Held(n) => {
                entry.state = BlockState::Held(n - 1);
                if entry.pinned {
                    self.pins.note_readers(block, self.references(block));
                }
            }
            _ => debug_assert!(false, "released a block that nobody holds"),
        }
    }
}
