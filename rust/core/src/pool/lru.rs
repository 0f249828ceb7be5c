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

    fn remove(&mut self, links: &mut Links, block: BlockId) {
        let Link { older, newer } = links.0[block.index()];
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

    fn leave(&mut self, group: GroupId, block: BlockId) {
        self.lists[group.index()].remove(&mut self.links, block);
    }

    fn give_up(&mut self, _group: GroupId, _block: BlockId) {}

    fn forget(&mut self, _block: BlockId) {}

    fn recall(&mut self, _block: BlockId) {}

    fn next(&self, group: GroupId) -> Option<BlockId> {
        let oldest = self.lists[group.index()].oldest;
        oldest.is_some().then_some(oldest)
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
