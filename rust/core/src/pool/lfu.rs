//! The block that was used least often goes first.
//!
//! LFU with dynamic ageing (Arlitt et al. 2000, LFU-DA): a block's rank is its uses above the rank
//! of what was given up last, so that what was used often and long ago sinks below what comes. It
//! has no use for advice.

use std::collections::BTreeSet;

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::reserve::filled;

use super::victims::{Advice, Rank, Victims};

#[derive(Clone, Copy)]
struct Known {
    uses: u64,
    rank: Rank,
}

#[derive(Default)]
struct Ranked {
    blocks: BTreeSet<(Rank, BlockId)>,
    /// The rank of what was given up last.
    sunk: u64,
}

/// See the head of this file.
pub(super) struct Lfu {
    blocks: Vec<Known>,
    groups: Vec<Ranked>,
    turns: u64,
}

impl Lfu {
    pub(super) fn new(blocks: usize, groups: usize) -> Result<Lfu, Error> {
        let none = Known { uses: 0, rank: (0, 0, 0) };
        Ok(Lfu {
            blocks: filled("uses of blocks", none, blocks)?,
            groups: (0..groups).map(|_| Ranked::default()).collect(),
            turns: 0,
        })
    }
}

impl Victims for Lfu {
    fn enter(&mut self, group: GroupId, block: BlockId) -> Rank {
        self.turns += 1;
        let order = &mut self.groups[group.index()];
        let known = &mut self.blocks[block.index()];
        known.uses += 1;
        known.rank = (0, order.sunk.saturating_add(known.uses), self.turns);
        order.blocks.insert((known.rank, block));
        known.rank
    }

    fn leave(&mut self, group: GroupId, block: BlockId) {
        let rank = self.blocks[block.index()].rank;
        self.groups[group.index()].blocks.remove(&(rank, block));
    }

    fn give_up(&mut self, group: GroupId, block: BlockId) {
        let order = &mut self.groups[group.index()];
        order.sunk = order.sunk.max(self.blocks[block.index()].rank.1);
    }

    fn forget(&mut self, block: BlockId) {
        self.blocks[block.index()].uses = 0;
    }

    fn recall(&mut self, _block: BlockId) {}

    fn next(&self, group: GroupId) -> Option<BlockId> {
        self.groups[group.index()].blocks.first().map(|&(_, block)| block)
    }

    fn past(&self, _group: GroupId) -> Option<BlockId> {
        None
    }

    fn advise(&mut self, _group: GroupId, _block: BlockId, _advice: Advice) -> Option<Rank> {
        None
    }

    fn set_time(&mut self, _now: u64) -> Vec<(GroupId, BlockId, Rank)> {
        Vec::new()
    }

    fn in_order(&self, group: GroupId) -> Vec<(Rank, BlockId)> {
        self.groups[group.index()].blocks.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GROUP: GroupId = GroupId(0);
    const BLOCKS: u32 = 6;

    #[test]
    fn what_was_used_often_and_long_ago_goes_in_the_end() {
        let mut order = Lfu::new(64, 1).unwrap();
        let often = BlockId::new(0);
        for _ in 0..10 {
            order.enter(GROUP, often);
            order.leave(GROUP, often);
        }
        order.enter(GROUP, often);
        let goes = |round: &u32| {
            order.enter(GROUP, BlockId::new(*round));
            let next = order.next(GROUP).unwrap();
            if next != often {
                order.give_up(GROUP, next);
                order.leave(GROUP, next);
                order.forget(next);
            }
            next == often
        };
        assert_eq!((1..60).find(goes), Some(11), "eleven uses outlast eleven blocks of one use");
    }

    proptest! {
        /// Against a list that is sorted anew each time.
        #[test]
        fn the_order_is_that_of_a_sorted_list(
            steps in proptest::collection::vec((0..BLOCKS, any::<bool>()), 1..80),
        ) {
            let mut order = Lfu::new(BLOCKS as usize, 1).unwrap();
            let mut lines: Vec<(u64, usize, u32)> = Vec::new();
            let (mut uses, mut sunk) = ([0u64; BLOCKS as usize], 0);
            for (now, (number, evicts)) in steps.into_iter().enumerate() {
                let block = BlockId::new(number);
                if let Some(at) = lines.iter().position(|line| line.2 == number) {
                    lines.remove(at);
                    order.leave(GROUP, block);
                } else {
                    order.enter(GROUP, block);
                    uses[number as usize] += 1;
                    lines.push((sunk + uses[number as usize], now, number));
                }
                lines.sort_unstable();
                let wanted: Vec<BlockId> =
                    lines.iter().map(|line| BlockId::new(line.2)).collect();
                let got: Vec<BlockId> =
                    order.in_order(GROUP).into_iter().map(|(_, block)| block).collect();
                prop_assert_eq!(&got, &wanted);
                prop_assert_eq!(order.next(GROUP), wanted.first().copied());
                if evicts && !lines.is_empty() {
                    let (rank, _, gone) = lines.remove(0);
                    let block = BlockId::new(gone);
                    order.give_up(GROUP, block);
                    order.leave(GROUP, block);
                    order.forget(block);
                    sunk = sunk.max(rank);
                    uses[gone as usize] = 0;
                }
            }
        }
    }
}
