//! Lists threaded through one flat array: every operation touches at most three links.

use crate::error::Error;
use crate::ids::BlockId;
use crate::reserve::filled;

#[derive(Clone, Copy)]
struct Link {
    older: BlockId,
    newer: BlockId,
}

/// The links of every block of an arena; any number of [`LruList`]s share them.
pub(super) struct Links(Vec<Link>);

/// One list, from the block that was used longest ago to the one used last.
#[derive(Clone, Copy)]
pub(super) struct LruList {
    oldest: BlockId,
    newest: BlockId,
    len: usize,
}

impl Links {
    pub(super) fn new(blocks: usize) -> Result<Links, Error> {
        let none = Link { older: BlockId::NONE, newer: BlockId::NONE };
        filled("order of use of blocks", none, blocks).map(Links)
    }

    /// The block that follows in time, for a walk over a list.
    pub(super) fn newer(&self, block: BlockId) -> BlockId {
        self.0[block.index()].newer
    }
}

impl LruList {
    pub(super) const EMPTY: LruList =
        LruList { oldest: BlockId::NONE, newest: BlockId::NONE, len: 0 };

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn oldest(&self) -> BlockId {
        self.oldest
    }

    pub(super) fn push_newest(&mut self, links: &mut Links, block: BlockId) {
        links.0[block.index()] = Link { older: self.newest, newer: BlockId::NONE };
        if self.newest.is_some() {
            links.0[self.newest.index()].newer = block;
        } else {
            self.oldest = block;
        }
        self.newest = block;
        self.len += 1;
    }

    pub(super) fn remove(&mut self, links: &mut Links, block: BlockId) {
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
        self.len -= 1;
    }
}
