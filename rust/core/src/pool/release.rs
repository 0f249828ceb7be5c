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
        let mut row = blocks;
        while let Some(&last) = row.last() {
            let Block { state, indexed, .. } = self.blocks[last.index()];
            let left = match state {
                BlockState::Held(1) if indexed => self.cache_run(row, owners),
                BlockState::Held(1) => self.free_run(row, owners),
                _ => self.leave_run(row, owners),
            };
            row = &row[..left];
        }
    }

    /// Has the blocks at the end of a row cached whose only holder goes and that the index names,
    /// as far as they are of one slab, whose books then change once; returns how many are left.
    fn cache_run(&mut self, row: &[BlockId], owners: u32) -> usize {
        let Block { slab, group, .. } = self.blocks[row[row.len() - 1].index()];
        let mut left = row.len();
        for &block in row.iter().rev() {
            let entry = &mut self.blocks[block.index()];
            if entry.state != BlockState::Held(1) || !entry.indexed || entry.slab != slab {
                break;
            }
            entry.state = BlockState::Cached;
            entry.owners -= owners;
            left -= 1;
        }
        let cached = &row[left..];
        let pool = &mut self.groups[group.index()];
        pool.held -= cached.len();
        pool.cached += cached.len();
        self.slabs[usize::from(slab)].cached += cached.len() as u32;
        self.order.enter_row(group, cached);
        left
    }

    /// Takes a holder from the blocks at the end of a row that others hold too; returns how many
    /// are left.
    fn leave_run(&mut self, row: &[BlockId], owners: u32) -> usize {
        for (left, &block) in row.iter().enumerate().rev() {
            let entry = &mut self.blocks[block.index()];
            let BlockState::Held(readers @ 2..) = entry.state else {
                debug_assert!(entry.state == BlockState::Held(1), "released a block nobody holds");
                return left + usize::from(left + 1 < row.len());
            };
            entry.state = BlockState::Held(readers - 1);
            entry.owners -= owners;
            if entry.pinned {
                self.pins.note_readers(block, readers - 1);
            }
        }
        0
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
