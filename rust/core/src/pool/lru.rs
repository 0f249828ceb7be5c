//! The least recently used block goes first: lists threaded through one flat array, in which every
//! operation touches at most three links.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::reserve::filled;

use super::victims::{Advice, Rank, Victims};

#[derive(Clone, Copy)]
struct Link {
    older: BlockId,
    newer: BlockId,
}

/// The links of every block of an arena; any number of [`LruList`]s share them.
struct Links(Vec<Link>);

/// One list, from the block that was used longest ago to the one used last.
#[derive(Clone, Copy)]
struct LruList {
    oldest: BlockId,
    newest: BlockId,
}

impl LruList {
    const EMPTY: LruList = LruList { oldest: BlockId::NONE, newest: BlockId::NONE };

    fn push_newest(&mut self, links: &mut Links, block: BlockId) {
        links.0[block.index()] = Link { older: self.newest, newer: BlockId::NONE };
        if self.newest.is_some() {
            links.0[self.newest.index()].newer = block;
        } else {
            self.oldest = block;
        }
        self.newest = block;
    }

    /// The last block of a row first, so that it is the oldest of them.
    fn push_row(&mut self, links: &mut Links, row: &[BlockId]) {
        let [first, .., last] = *row else {
            row.iter().for_each(|&block| self.push_newest(links, block));
            return;
        };
        self.push_newest(links, last);
        for pair in row.windows(2).rev() {
            links.0[pair[1].index()].newer = pair[0];
            links.0[pair[0].index()] = Link { older: pair[1], newer: BlockId::NONE };
        }
        self.newest = first;
    }

    fn remove(&mut self, links: &mut Links, block: BlockId) {
        self.remove_between(links, links.0[block.index()]);
    }

    /// Blocks of a row that stand side by side, as they do that entered as a row, leave together.
    fn remove_row(&mut self, links: &mut Links, row: &[BlockId]) {
        let mut row = row.iter().copied().peekable();
        while let Some(block) = row.next() {
            let Link { mut older, newer } = links.0[block.index()];
            while let Some(next) = row.next_if(|&next| next == older) {
                older = links.0[next.index()].older;
            }
            self.remove_between(links, Link { older, newer });
        }
    }

    /// Joins the ends of the list that are left when what stands between two blocks goes.
    fn remove_between(&mut self, links: &mut Links, Link { older, newer }: Link) {
        if older.is_some() {
            links.0[older.index()].newer = newer;
        } else {
            self.oldest = newer;
        }
        if newer.is_some() {
            links.0[newer.index()].older = older;
        } else {
            self.newest = older;
        }
    }
}

/// A list for each group. It has no use for advice.
pub(super) struct Lru {
    links: Links,
    lists: Vec<LruList>,
    turns: u64,
}

impl Lru {
    pub(super) fn new(blocks: usize, groups: usize) -> Result<Lru, Error> {
        let none = Link { older: BlockId::NONE, newer: BlockId::NONE };
        let links = filled("order of use of blocks", none, blocks).map(Links)?;
        Ok(Lru { links, lists: vec![LruList::EMPTY; groups], turns: 0 })
    }
}

impl Victims for Lru {
    fn enter(&mut self, group: GroupId, block: BlockId) -> Rank {
        self.lists[group.index()].push_newest(&mut self.links, block);
        self.turns += 1;
        (0, 0, self.turns)
    }

    #[inline]
    fn leave(&mut self, group: GroupId, block: BlockId) {
        self.lists[group.index()].remove(&mut self.links, block);
    }

    fn enter_row(&mut self, group: GroupId, row: &[BlockId]) {
        self.lists[group.index()].push_row(&mut self.links, row);
        self.turns += row.len() as u64;
    }

    fn leave_row(&mut self, group: GroupId, row: &[BlockId]) {
        self.lists[group.index()].remove_row(&mut self.links, row);
    }

    #[inline]
    fn give_up(&mut self, _group: GroupId, _block: BlockId) {}

    #[inline]
    fn forget(&mut self, _block: BlockId) {}

    fn recall(&mut self, _block: BlockId) {}

    #[inline]
    fn next(&self, group: GroupId) -> Option<BlockId> {
        let oldest = self.lists[group.index()].oldest;
        oldest.is_some().then_some(oldest)
    }

    #[inline]
    fn past(&self, _group: GroupId) -> Option<BlockId> {
        None
    }

    fn advise(&mut self, _group: GroupId, _block: BlockId, _advice: Advice) -> Option<Rank> {
        None
    }

    fn set_time(&mut self, _now: u64) -> Vec<(GroupId, BlockId, Rank)> {
        Vec::new()
    }

    /// Ranks are counted from the oldest on: below those of all blocks that enter later.
    fn in_order(&self, group: GroupId) -> Vec<(Rank, BlockId)> {
        let newer = |block: &BlockId| {
            let newer = self.links.0[block.index()].newer;
            newer.is_some().then_some(newer)
        };
        // A list that bites its tail is no longer than all blocks are many.
        let blocks = std::iter::successors(self.next(group), newer).take(self.links.0.len() + 1);
        (0..).map(|at| (0, 0, at)).zip(blocks).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCKS: u32 = 24;
    const GROUP: GroupId = GroupId(0);

    fn order(lru: &Lru) -> Vec<BlockId> {
        lru.in_order(GROUP).into_iter().map(|(_, block)| block).collect()
    }

    proptest! {
        /// A row that enters or leaves at once is its blocks one by one, wherever they stand.
        #[test]
        fn a_row_is_its_blocks_one_by_one(
            rows in prop::collection::vec(prop::collection::vec(0..BLOCKS, 0..9), 1..40),
        ) {
            let mut at_once = Lru::new(BLOCKS as usize, 1).unwrap();
            let mut each = Lru::new(BLOCKS as usize, 1).unwrap();
            for named in rows {
                let mut row: Vec<BlockId> = Vec::new();
                for block in named.into_iter().map(BlockId::new) {
                    if !row.contains(&block) {
                        row.push(block);
                    }
                }
                let cached = order(&each);
                let (leaving, entering): (Vec<BlockId>, Vec<BlockId>) =
                    row.into_iter().partition(|block| cached.contains(block));
                at_once.leave_row(GROUP, &leaving);
                leaving.iter().for_each(|&block| each.leave(GROUP, block));
                prop_assert_eq!(order(&at_once), order(&each));
                at_once.enter_row(GROUP, &entering);
                for &block in entering.iter().rev() {
                    each.enter(GROUP, block);
                }
                prop_assert_eq!(order(&at_once), order(&each));
                prop_assert_eq!(at_once.turns, each.turns);
            }
        }
    }
}
