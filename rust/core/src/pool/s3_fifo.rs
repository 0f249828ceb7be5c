//! Two queues in order of arrival: a small one in which blocks are on trial, and a main one.
//!
//! S3-FIFO (Yang et al., SOSP 2023, Algorithm 1): a block enters the small queue. When it would go
//! from there, it goes to the main queue instead if it was used more than once meanwhile. What was
//! given up and comes again enters the main queue at once; the cache remembers what went. A block
//! of the main queue that was used goes to its end with one use less, and goes when none is left.
//!
//! A block that is held is in neither queue, for it cannot go, and comes back to the place that it
//! had. The small queue gives where it has a tenth of what is cached. The order has no use for
//! advice.

use std::collections::BTreeSet;

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::reserve::filled;

use super::victims::{Advice, Rank, Victims};

/// Of the uses of a block, those that count.
const MOST_USES: u8 = 3;
/// So many uses take a block from the small queue to the main one.
const TRIED: u8 = 2;
/// The small queue gives where it is at least one in so many.
const SMALL: usize = 10;

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// Its place in a queue; 0 before it has one.
    turn: u64,
    main: bool,
    /// Since it entered its queue.
    uses: u8,
}

/// The cached blocks of a group, by their places.
#[derive(Clone, Default)]
struct Queues {
    small: BTreeSet<(u64, BlockId)>,
    main: BTreeSet<(u64, BlockId)>,
}

impl Queues {
    fn of(&mut self, known: Known) -> &mut BTreeSet<(u64, BlockId)> {
        if known.main { &mut self.main } else { &mut self.small }
    }

    /// Whether the small queue gives, if `moved` of its blocks were in the main one.
    fn small_gives(&self, moved: usize) -> bool {
        let (small, main) = (self.small.len() - moved, self.main.len() + moved);
        small > 0 && (main == 0 || small * SMALL >= small + main)
    }
}

/// See the head of this file.
#[derive(Clone)]
pub(super) struct S3Fifo {
    blocks: Vec<Known>,
    groups: Vec<Queues>,
    turns: u64,
}

impl S3Fifo {
    pub(super) fn new(blocks: usize, groups: usize) -> Result<S3Fifo, Error> {
        Ok(S3Fifo {
            blocks: filled("places of blocks", Known::default(), blocks)?,
            groups: vec![Queues::default(); groups],
            turns: 0,
        })
    }

    fn uses(&self, block: BlockId) -> u8 {
        self.blocks[block.index()].uses
    }

    /// Puts a cached block at the end of the main queue.
    fn put_last(&mut self, group: GroupId, block: BlockId, uses: u8) {
        self.turns += 1;
        let queues = &mut self.groups[group.index()];
        let known = &mut self.blocks[block.index()];
        queues.of(*known).remove(&(known.turn, block));
        *known = Known { turn: self.turns, main: true, uses };
        queues.main.insert((known.turn, block));
    }
}

impl Victims for S3Fifo {
    fn enter(&mut self, group: GroupId, block: BlockId) -> Rank {
        let known = &mut self.blocks[block.index()];
        if known.turn == 0 {
            self.turns += 1;
            known.turn = self.turns;
        } else {
            known.uses = MOST_USES.min(known.uses + 1);
        }
        self.groups[group.index()].of(*known).insert((known.turn, block));
        (0, u64::from(known.main), known.turn)
    }

    fn leave(&mut self, group: GroupId, block: BlockId) {
        let known = self.blocks[block.index()];
        self.groups[group.index()].of(known).remove(&(known.turn, block));
    }

    /// Moves what stands before the block on, as it is passed over. A block that goes out of turn
    /// passes nobody.
    fn give_up(&mut self, group: GroupId, block: BlockId) {
        if self.next(group) != Some(block) {
            return;
        }
        loop {
            let queues = &self.groups[group.index()];
            let small = queues.small_gives(0);
            let queue = if small { &queues.small } else { &queues.main };
            let Some(&(_, first)) = queue.first() else { return };
            match (small, self.uses(first)) {
                (true, TRIED..) => self.put_last(group, first, 0),
                (false, uses @ 1..) => self.put_last(group, first, uses - 1),
                _ => return,
            }
        }
    }

    fn forget(&mut self, block: BlockId) {
        self.blocks[block.index()] = Known::default();
    }

    fn recall(&mut self, block: BlockId) {
        let known = &mut self.blocks[block.index()];
        // One that has a place in the small queue already was cached since, and keeps it.
        known.main |= known.turn == 0;
    }

    fn next(&self, group: GroupId) -> Option<BlockId> {
        let queues = &self.groups[group.index()];
        let mut moved = 0;
        for &(_, block) in &queues.small {
            if !queues.small_gives(moved) {
                break;
            }
            if self.uses(block) < TRIED {
                return Some(block);
            }
            moved += 1;
        }
        // What moved on from the small queue stands last, with no use.
        let unused = queues.small.first().filter(|_| moved > 0).map(|&(_, block)| (0, block));
        let mut fewest = None;
        for &(_, block) in &queues.main {
            let uses = self.uses(block);
            if fewest.is_none_or(|(least, _)| uses < least) {
                fewest = Some((uses, block));
            }
            if uses == 0 {
                break;
            }
        }
        let first = match (fewest, unused) {
            (Some((1.., _)) | None, Some(moved)) => Some(moved),
            (fewest, _) => fewest,
        };
        first.map(|(_, block)| block)
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

    /// Ranks are counted from the first to go: they say nothing of blocks that enter later.
    fn in_order(&self, group: GroupId) -> Vec<(Rank, BlockId)> {
        let mut order = self.clone();
        let mut go = || {
            let next = order.next(group)?;
            order.give_up(group, next);
            order.leave(group, next);
            Some(next)
        };
        (0..).map_while(|at| go().map(|block| ((0, 0, at), block))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const GROUP: GroupId = GroupId(0);
    const BLOCKS: u32 = 24;

    /// The paper's Algorithm 1 over two queues of blocks with their uses, all of them cached.
    #[derive(Default)]
    struct Paper {
        small: VecDeque<(u32, u8)>,
        main: VecDeque<(u32, u8)>,
    }

    impl Paper {
        fn access(&mut self, block: u32, ghost: bool) {
            let all = self.small.iter_mut().chain(&mut self.main);
            match all.into_iter().find(|entry| entry.0 == block) {
                Some(entry) => entry.1 = MOST_USES.min(entry.1 + 1),
                None if ghost => self.main.push_back((block, 0)),
                None => self.small.push_back((block, 0)),
            }
        }

        fn evict(&mut self) -> Option<u32> {
            loop {
                let all = self.small.len() + self.main.len();
                if self.main.is_empty() || self.small.len() * SMALL >= all {
                    let (block, uses) = self.small.pop_front()?;
                    if uses < TRIED {
                        return Some(block);
                    }
                    self.main.push_back((block, 0));
                } else {
                    let (block, uses) = self.main.pop_front()?;
                    if uses == 0 {
                        return Some(block);
                    }
                    self.main.push_back((block, uses - 1));
                }
            }
        }
    }

    fn evict(order: &mut S3Fifo, block: BlockId) {
        order.give_up(GROUP, block);
        order.leave(GROUP, block);
        order.forget(block);
    }

    #[test]
    fn what_comes_once_goes_before_what_came_again() {
        let mut order = S3Fifo::new(64, 1).unwrap();
        let again = BlockId::new(0);
        order.recall(again);
        order.enter(GROUP, again);
        for number in 1..60 {
            let once = BlockId::new(number);
            order.enter(GROUP, once);
            assert_eq!(order.next(GROUP), Some(once), "the small queue gives");
            evict(&mut order, once);
        }
        assert_eq!(order.next(GROUP), Some(again));
    }

    #[test]
    fn what_is_held_comes_back_to_its_place() {
        let mut order = S3Fifo::new(8, 1).unwrap();
        let [first, second] = [0, 1].map(BlockId::new);
        order.enter(GROUP, first);
        order.enter(GROUP, second);
        order.leave(GROUP, first);
        assert_eq!(order.next(GROUP), Some(second));
        order.enter(GROUP, first);
        assert_eq!(order.next(GROUP), Some(first), "one use is too few for the main queue");
    }

    proptest! {
        #[test]
        fn the_order_is_the_papers(
            steps in proptest::collection::vec((0..BLOCKS, any::<bool>(), any::<bool>()), 1..200),
        ) {
            let mut order = S3Fifo::new(BLOCKS as usize, 1).unwrap();
            let (mut paper, mut cached) = (Paper::default(), BTreeSet::new());
            for (number, ghost, evicts) in steps {
                let block = BlockId::new(number);
                if cached.insert(number) {
                    if ghost {
                        order.recall(block);
                    }
                } else {
                    order.leave(GROUP, block);
                }
                order.enter(GROUP, block);
                paper.access(number, ghost);
                let foretold = order.in_order(GROUP);
                prop_assert_eq!(foretold.len(), cached.len());
                prop_assert_eq!(foretold.first().map(|entry| entry.1), order.next(GROUP));
                if evicts {
                    let gone = paper.evict().unwrap();
                    prop_assert_eq!(order.next(GROUP), Some(BlockId::new(gone)));
                    evict(&mut order, BlockId::new(gone));
                    cached.remove(&gone);
                }
            }
            let order: Vec<usize> =
                order.in_order(GROUP).into_iter().map(|(_, block)| block.index()).collect();
            let rest: Vec<usize> =
                std::iter::from_fn(|| paper.evict()).map(|block| block as usize).collect();
            prop_assert_eq!(order, rest);
        }
    }
}
