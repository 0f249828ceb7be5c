//! An order that weighs what a block costs to have again against how likely it is to be used.
//!
//! Blocks are ranked as by GreedyDual with frequencies (Cherkasova 1998, GDF): a block's rank is
//! its likelihood of being used again times its cost, above the rank of what was given up last, so
//! that what is not used sinks below what comes. Of its uses it counts whether there was a second
//! one: how often it came says little, and chats whose turns are counted for ever stay long after
//! their end. What a second use says is measured, see [`Likelihood`]. Priority goes before rank,
//! and being past its time before priority.

use std::collections::BTreeSet;

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::reserve::filled;

use super::likelihood::Likelihood;
use super::victims::{Advice, Hint, Past, Rank, Victims};

#[derive(Clone, Copy)]
struct Known {
    advice: Advice,
    uses: u32,
    /// Whether its first use was before it had to go.
    recalled: bool,
    rank: Rank,
    cached: bool,
}

/// A block that nothing is known of.
const UNKNOWN: Known = Known {
    advice: Advice { priority: 0, cost: 1, until: u64::MAX, past: Past::First, hint: Hint::None },
    uses: 0,
    recalled: false,
    rank: (0, 0, 0),
    cached: false,
};

struct Ranked {
    ranked: BTreeSet<(Rank, BlockId)>,
    /// Those that do not last for ever, by their time.
    timed: BTreeSet<(u64, BlockId)>,
    /// The rank of what was given up last.
    sunk: u64,
    likelihood: Likelihood,
}

impl Ranked {
    fn new(blocks: usize) -> Ranked {
        let likelihood = Likelihood::new(blocks);
        Ranked { ranked: BTreeSet::new(), timed: BTreeSet::new(), sunk: 0, likelihood }
    }
}

impl Advice {
    /// Nothing is left of it if its time is past, and it is of the kind that ends then.
    fn lapse(&mut self, now: u64) {
        if self.until <= now && self.past == Past::Plain {
            *self = Advice { cost: self.cost, ..Advice::default() };
        }
    }
}

/// See the head of this file.
pub(super) struct CostAware {
    blocks: Vec<Known>,
    groups: Vec<Ranked>,
    now: u64,
    turns: u64,
}

impl CostAware {
    pub(super) fn new(blocks: usize, groups: usize) -> Result<CostAware, Error> {
        Ok(CostAware {
            blocks: filled("ranks of blocks", UNKNOWN, blocks)?,
            groups: (0..groups).map(|_| Ranked::new(blocks)).collect(),
            now: 0,
            turns: 0,
        })
    }

    /// Has numbers up to `blocks`, of which none so far is given up.
    pub(super) fn grow(&mut self, blocks: usize) {
        self.blocks.resize(blocks, UNKNOWN);
        for group in &mut self.groups {
            group.likelihood.grow(blocks);
        }
    }

    /// Where a cached block stands.
    pub(super) fn rank(&self, block: BlockId) -> Rank {
        self.blocks[block.index()].rank
    }

    /// Ranks a block anew and enters it.
    fn put(&mut self, group: GroupId, block: BlockId) -> Rank {
        self.turns += 1;
        let order = &mut self.groups[group.index()];
        let known = &mut self.blocks[block.index()];
        known.advice.lapse(self.now);
        let Advice { priority, cost, until, .. } = known.advice;
        let worth = order.likelihood.worth(known.uses) * u64::from(cost);
        known.rank = (priority, order.sunk.saturating_add(worth), self.turns);
        known.cached = true;
        order.ranked.insert((known.rank, block));
        if until < u64::MAX {
            order.timed.insert((until, block));
        }
        known.rank
    }

    fn take(&mut self, group: GroupId, block: BlockId) {
        let order = &mut self.groups[group.index()];
        let known = &mut self.blocks[block.index()];
        known.cached = false;
        order.ranked.remove(&(known.rank, block));
        order.timed.remove(&(known.advice.until, block));
    }
}

impl Victims for CostAware {
    fn enter(&mut self, group: GroupId, block: BlockId) -> Rank {
        let known = &mut self.blocks[block.index()];
        // What it was before it had to go is not known any more.
        if !std::mem::take(&mut known.recalled) && known.uses > 0 {
            self.groups[group.index()].likelihood.note_used(known.uses);
        }
        known.uses = known.uses.saturating_add(1);
        self.put(group, block)
    }

    fn leave(&mut self, group: GroupId, block: BlockId) {
        self.take(group, block);
    }

    fn give_up(&mut self, group: GroupId, block: BlockId) {
        let known = &self.blocks[block.index()];
        // The rank of what is past its time says nothing of the others.
        if known.advice.until > self.now {
            let order = &mut self.groups[group.index()];
            order.sunk = order.sunk.max(known.rank.1);
            order.likelihood.note_gone(known.uses);
        }
    }

    fn forget(&mut self, block: BlockId) {
        let known = &mut self.blocks[block.index()];
        (known.advice, known.uses, known.recalled) = (Advice::default(), 0, false);
    }

    fn recall(&mut self, block: BlockId) {
        let known = &mut self.blocks[block.index()];
        debug_assert!(!known.cached, "block {block:?} is held");
        known.recalled |= known.uses == 0;
        known.uses = known.uses.saturating_add(1);
    }

    fn next(&self, group: GroupId) -> Option<BlockId> {
        let ranked = &self.groups[group.index()].ranked;
        self.past(group).or_else(|| ranked.first().map(|&(_, block)| block))
    }

    fn past(&self, group: GroupId) -> Option<BlockId> {
        let first = self.groups[group.index()].timed.first();
        first.filter(|&&(until, _)| until <= self.now).map(|&(_, block)| block)
    }

    fn advise(&mut self, group: GroupId, block: BlockId, advice: Advice) -> Option<Rank> {
        let cached = self.blocks[block.index()].cached;
        if cached {
            self.take(group, block);
        }
        let known = &mut self.blocks[block.index()];
        known.advice = advice;
        match advice.hint {
            Hint::None => {}
            Hint::Soon => known.uses = known.uses.saturating_add(1),
            Hint::Done => (known.advice.until, known.advice.past) = (0, Past::First),
        }
        cached.then(|| self.put(group, block))
    }

    /// What has lapsed stands as if nothing had been said of it, in the order of its times.
    fn set_time(&mut self, now: u64) -> Vec<(GroupId, BlockId, Rank)> {
        self.now = self.now.max(now);
        let mut lapsed = Vec::new();
        for (order, group) in self.groups.iter().zip((0..).map(GroupId)) {
            let past = order.timed.iter().take_while(|&&(until, _)| until <= self.now);
            let plain = |&&(_, block): &&(u64, BlockId)| {
                self.blocks[block.index()].advice.past == Past::Plain
            };
            lapsed.extend(past.filter(plain).map(|&(_, block)| (group, block)));
        }
        let anew = |(group, block): (GroupId, BlockId)| {
            self.take(group, block);
            (group, block, self.put(group, block))
        };
        lapsed.into_iter().map(anew).collect()
    }

    fn in_order(&self, group: GroupId) -> Vec<(Rank, BlockId)> {
        let order = &self.groups[group.index()];
        let past = order.timed.iter().take_while(|&&(until, _)| until <= self.now);
        let past = past.map(|&(_, block)| (self.blocks[block.index()].rank, block));
        let lasts = |block: BlockId| self.blocks[block.index()].advice.until > self.now;
        past.chain(order.ranked.iter().copied().filter(|&(_, block)| lasts(block))).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GROUP: GroupId = GroupId(0);
    const BLOCKS: u32 = 6;

    /// What a test knows of a cached block.
    #[derive(Clone, Copy, Debug)]
    struct Line {
        block: u32,
        advice: Advice,
        rank: u64,
        entered: usize,
    }

    fn block(number: u32) -> BlockId {
        BlockId::new(number)
    }

    fn advised(order: &mut CostAware, number: u32, advice: Advice) {
        order.advise(GROUP, block(number), advice);
        order.enter(GROUP, block(number));
    }

    fn evict(order: &mut CostAware, block: BlockId) {
        order.give_up(GROUP, block);
        order.leave(GROUP, block);
        order.forget(block);
    }

    #[test]
    fn time_goes_before_priority_and_priority_before_cost() {
        let mut order = CostAware::new(8, 1).unwrap();
        let plain = Advice::default();
        advised(&mut order, 0, Advice { priority: 1, ..plain });
        advised(&mut order, 1, Advice { cost: 9, ..plain });
        advised(&mut order, 2, Advice { cost: 3, ..plain });
        advised(&mut order, 3, Advice { priority: 7, cost: 100, until: 50, ..plain });
        advised(&mut order, 4, Advice { priority: 9, hint: Hint::Done, ..plain });
        let numbers = |order: &CostAware| -> Vec<usize> {
            order.in_order(GROUP).iter().map(|(_, block)| block.index()).collect()
        };
        assert_eq!(numbers(&order), [4, 2, 1, 0, 3]);
        order.set_time(50);
        assert_eq!(numbers(&order), [4, 3, 2, 1, 0]);
    }

    #[test]
    fn what_is_not_used_sinks_below_what_comes() {
        let mut order = CostAware::new(64, 1).unwrap();
        advised(&mut order, 0, Advice { cost: 10, ..Advice::default() });
        let goes = |round: &u32| {
            order.enter(GROUP, block(*round));
            let next = order.next(GROUP).unwrap();
            if next != block(0) {
                evict(&mut order, next);
            }
            next == block(0)
        };
        assert_eq!((1..60).find(goes), Some(10), "it is worth ten others, and then it goes");
    }

    proptest! {
        /// Against a list that is sorted anew each time.
        #[test]
        fn the_order_is_that_of_a_sorted_list(
            steps in proptest::collection::vec(
                (0..BLOCKS, 0u8..3, 1u32..5, 0u64..40, any::<bool>()), 1..80,
            ),
        ) {
            let mut order = CostAware::new(BLOCKS as usize, 1).unwrap();
            let (mut lines, mut uses): (Vec<Line>, _) = (Vec::new(), [0u32; BLOCKS as usize]);
            let mut sunk = 0;
            for (now, (number, priority, cost, until, evicts)) in steps.into_iter().enumerate() {
                order.set_time(now as u64);
                let past = |line: &Line| line.advice.until <= now as u64;
                let key = |line: &Line| match past(line) {
                    true => (0, 0, line.advice.until, line.block as usize),
                    false => (1, line.advice.priority, line.rank, line.entered),
                };
                if let Some(at) = lines.iter().position(|line| line.block == number) {
                    lines.remove(at);
                    order.leave(GROUP, block(number));
                } else {
                    let advice = Advice { priority, cost, until, ..Advice::default() };
                    advised(&mut order, number, advice);
                    uses[number as usize] += 1;
                    let worth = order.groups[0].likelihood.worth(uses[number as usize]);
                    let rank = sunk + worth * u64::from(cost);
                    lines.push(Line { block: number, advice, rank, entered: now });
                }
                lines.sort_by_key(key);
                let wanted: Vec<BlockId> = lines.iter().map(|line| block(line.block)).collect();
                let got: Vec<BlockId> =
                    order.in_order(GROUP).into_iter().map(|(_, block)| block).collect();
                prop_assert_eq!(got, wanted);
                prop_assert_eq!(order.next(GROUP), lines.first().map(|line| block(line.block)));
                if evicts && !lines.is_empty() {
                    let gone = lines.remove(0);
                    evict(&mut order, block(gone.block));
                    sunk = if past(&gone) { sunk } else { sunk.max(gone.rank) };
                    uses[gone.block as usize] = 0;
                }
            }
        }
    }
}
