//! Blocks that knowledge bases have pinned, and which of them nobody reads, in the order in which
//! they would be given up. The order is kept, not made: above the watermark every call asks for it.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use hashbrown::HashMap;

use crate::error::Error;
use crate::ids::BlockId;

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

impl Pins {
    /// Counts a pin of a block that has had `hits` and has so many holders, this pin among them.
    pub(super) fn add(&mut self, block: BlockId, hits: u32, since: (u64, u32), holders: u32) {
        let fresh = || Pin { count: 0, rank: (hits, Reverse(since), block) };
        self.pinned.entry(block).or_insert_with(fresh).count += 1;
        self.note_readers(block, holders);
    }

    /// Takes one pin of a block away; whether it was the last.
    pub(super) fn remove(&mut self, block: BlockId) -> bool {
        let Some(pin) = self.pinned.get_mut(&block) else { return false };
        pin.count -= 1;
        self.idle.remove(&pin.rank);
        let last = pin.count == 0;
        if last {
            self.pinned.remove(&block);
        }
        last
    }

    pub(super) fn note_hits(&mut self, block: BlockId, hits: u32, holders: u32) {
        let Some(pin) = self.pinned.get_mut(&block) else { return };
        self.idle.remove(&pin.rank);
        pin.rank.0 = hits;
        self.note_readers(block, holders);
    }

    /// Enters a pinned block whose holders have changed among those that nobody reads, or takes it
    /// out.
    pub(super) fn note_readers(&mut self, block: BlockId, holders: u32) {
        let Some(pin) = self.pinned.get(&block) else { return };
        if holders == pin.count {
            self.idle.insert(pin.rank);
        } else {
            self.idle.remove(&pin.rank);
        }
    }

    /// Pinned blocks that nobody reads, the first to be given up first.
    pub(super) fn idle(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.idle.iter().map(|&(_, _, block)| block)
    }

    /// Compares with the holders of each block, and whether it is marked as pinned.
    pub(super) fn check(
        &self,
        marked: usize,
        of: impl Fn(BlockId) -> (u32, bool),
    ) -> Result<(), Error> {
        if marked != self.pinned.len() {
            return Err(Error::inconsistent("pinned blocks", self.pinned.len(), marked));
        }
        let mut idle = 0;
        for (&block, pin) in &self.pinned {
            let (holders, is_marked) = of(block);
            if holders < pin.count || !is_marked {
                return Err(Error::inconsistent("holders of a pinned block", pin.count, holders));
            }
            if holders == pin.count {
                idle += 1;
                if !self.idle.contains(&pin.rank) {
                    return Err(Error::inconsistent("idle pins", block.index(), "it is missing"));
                }
            }
        }
        if idle != self.idle.len() {
            return Err(Error::inconsistent("idle pins", idle, self.idle.len()));
        }
        Ok(())
    }
}
