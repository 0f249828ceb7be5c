//! Blocks that knowledge bases have pinned, and which of them nobody reads, in the order in which
//! they would be given up. The order is kept, not made: above the watermark every call asks for it.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use hashbrown::HashMap;

use crate::error::Error;
use crate::ids::BlockId;

use super::blocks::{BlockState, Pool};

/// Which block goes first: the one with the fewest hits, of these the one that was pinned last.
type Rank = (u32, Reverse<(u64, u32)>, BlockId);

#[derive(Default)]
pub(super) struct Pins {
    pinned: HashMap<BlockId, Pin>,
    /// Pinned blocks that have no other holder.
    idle: BTreeSet<Rank>,
}

struct Pin {
    count: u32,
    rank: Rank,
}

impl Pool {
    /// Adds a pin, which is a holder of every block of a row, and a count of its first block. That
    /// has had `hits`; `since` says in what order blocks were pinned.
    pub fn pin(&mut self, row: &[BlockId], hits: u32, since: (u64, u32)) {
        self.hold(row);
        let block = row[0];
        let fresh = || Pin { count: 0, rank: (hits, Reverse(since), block) };
        self.pins.pinned.entry(block).or_insert_with(fresh).count += 1;
        self.blocks[block.index()].pinned = true;
        self.note_readers(block);
    }

    /// Removes a pin from a row of blocks.
    pub fn unpin(&mut self, row: &[BlockId]) {
        let block = row[0];
        if let Some(pin) = self.pins.pinned.get_mut(&block) {
            pin.count -= 1;
            self.pins.idle.remove(&pin.rank);
            if pin.count == 0 {
                self.pins.pinned.remove(&block);
                self.blocks[block.index()].pinned = false;
            }
        }
        self.release(row);
    }

    /// Notes how often a block has been hit, if it is pinned.
    pub fn note_hits(&mut self, block: BlockId, hits: u32) {
        let Some(pin) = self.pins.pinned.get_mut(&block) else { return };
        self.pins.idle.remove(&pin.rank);
        pin.rank.0 = hits;
        self.note_readers(block);
    }

    /// Pinned blocks that nobody reads, the first to be given up first.
    pub fn idle_pins(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.pins.idle.iter().map(|&(_, _, block)| block)
    }

    /// How many pinned blocks nobody reads.
    #[must_use]
    pub fn idle_count(&self) -> usize {
        self.pins.idle.len()
    }

    /// Enters a pinned block whose holders have changed among those that nobody reads, or takes it
    /// out.
    pub(super) fn note_readers(&mut self, block: BlockId) {
        let holders = self.references(block);
        let Some(pin) = self.pins.pinned.get(&block) else { return };
        if holders == pin.count {
            self.pins.idle.insert(pin.rank);
        } else {
            self.pins.idle.remove(&pin.rank);
        }
    }

    pub(super) fn check_pins(&self) -> Result<(), Error> {
        let marked = self.blocks.iter().filter(|block| block.pinned).count();
        if marked != self.pins.pinned.len() {
            return Err(Error::inconsistent("pinned blocks", self.pins.pinned.len(), marked));
        }
        let mut idle = 0;
        for (&block, pin) in &self.pins.pinned {
            let holders = match self.state(block) {
                BlockState::Held(holders) => holders,
                _ => 0,
            };
            if holders < pin.count || !self.blocks[block.index()].pinned {
                return Err(Error::inconsistent("holders of a pinned block", pin.count, holders));
            }
            if holders == pin.count {
                idle += 1;
                if !self.pins.idle.contains(&pin.rank) {
                    return Err(Error::inconsistent("idle pins", block.index(), "it is missing"));
                }
            }
        }
        if idle != self.pins.idle.len() {
            return Err(Error::inconsistent("idle pins", idle, self.pins.idle.len()));
        }
        Ok(())
    }
}
