//! Blocks that somebody holds from now on, as a reader or as one who may write them.

use crate::ids::BlockId;

use super::blocks::Pool;
use super::states::{Block, BlockState};

impl Pool {
    /// Adds a reader to each block; a cached one leaves the order of victims.
    pub fn hold(&mut self, blocks: &[BlockId]) {
        let mut rest = blocks;
        while let Some(&block) = rest.first() {
            let held = match self.state(block) {
                BlockState::Cached => self.hold_cached_run(rest),
                _ => self.hold_held_run(rest),
            };
            rest = &rest[held..];
        }
    }

    /// Holds the cached blocks that a row begins with, as far as they are of one slab, whose books
    /// then change once; returns how many. None of them is pinned: a pin is a holder.
    fn hold_cached_run(&mut self, row: &[BlockId]) -> usize {
        let Block { slab, group, .. } = self.blocks[row[0].index()];
        let mut count = 0;
        for &block in row {
            let entry = &mut self.blocks[block.index()];
            if entry.state != BlockState::Cached || entry.slab != slab {
                break;
            }
            entry.state = BlockState::Held(1);
            count += 1;
        }
        let pool = &mut self.groups[group.index()];
        pool.cached -= count;
        pool.held += count;
        self.slabs[usize::from(slab)].cached -= count as u32;
        self.order.leave_row(group, &row[..count]);
        count
    }

    /// Adds a reader to the blocks that a row begins with and that others hold already; returns
    /// how many they are.
    fn hold_held_run(&mut self, row: &[BlockId]) -> usize {
        for (count, &block) in row.iter().enumerate() {
            let entry = &mut self.blocks[block.index()];
            let BlockState::Held(readers) = entry.state else {
                debug_assert!(entry.state == BlockState::Cached, "held a void block");
                return count.max(1);
            };
            entry.state = BlockState::Held(readers + 1);
            if entry.pinned {
                self.pins.note_readers(block, readers + 1);
            }
        }
        row.len()
    }

    /// Adds an owner (and reader) to each block: the copy-on-write half of a fork.
    pub fn hold_as_owner(&mut self, blocks: &[BlockId]) {
        self.hold(blocks);
        self.own(blocks);
    }

    /// Makes this holder an owner of each block.
    pub(super) fn own(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.blocks[block.index()].owners += 1;
        }
    }

    /// Ends ownership of each block, which stays held.
    pub fn disown(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.blocks[block.index()].owners -= 1;
        }
    }
}
