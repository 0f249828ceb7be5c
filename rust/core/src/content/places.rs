//! Where the KV of each content lies: content × head group → a block of the arena, and back.
//!
//! Content stands for as long as its blocks of the first head group, and of all that keep every
//! token, do. A block of a window group can go before: it lets go of what no row sees any more.

use crate::error::Error;
use crate::heads::LocalWindow;
use crate::ids::BlockId;
use crate::reserve::filled;

use super::ids::ContentId;

/// The blocks of every content in every group, and the content of every block.
pub(super) struct Places {
    /// What each group keeps of a sequence; `None` for all of it.
    windows: Vec<Option<LocalWindow>>,
    /// Blocks that nobody else may hold yet, by number; empty if every group keeps all.
    withheld: Vec<bool>,
    /// [contents, groups]
    rows: Vec<BlockId>,
    /// By block number.
    contents: Vec<ContentId>,
}

impl Places {
    pub(super) fn new(capacity: usize, windows: Vec<Option<LocalWindow>>) -> Result<Places, Error> {
        let windowed = windows.iter().any(Option::is_some);
        let rows = capacity.saturating_mul(windows.len());
        Ok(Places {
            withheld: filled("withheld blocks", false, if windowed { capacity } else { 0 })?,
            rows: filled("rows of blocks", BlockId::NONE, rows)?,
            contents: filled("rows of blocks", ContentId::NONE, capacity)?,
            windows,
        })
    }

    pub(super) fn windows(&self) -> &[Option<LocalWindow>] {
        &self.windows
    }

    /// The blocks of a content in every group; none where a window group's is gone.
    pub(super) fn row(&self, content: ContentId) -> &[BlockId] {
        let groups = self.windows.len();
        &self.rows[content.index() * groups..][..groups]
    }

    /// The block of a content in one group.
    #[inline]
    pub(super) fn block(&self, content: ContentId, group: usize) -> BlockId {
        self.rows[content.index() * self.windows.len() + group]
    }

    fn row_mut(&mut self, content: ContentId) -> &mut [BlockId] {
        let groups = self.windows.len();
        &mut self.rows[content.index() * groups..][..groups]
    }

    /// The content that lies in a block of any group.
    pub(super) fn content(&self, block: BlockId) -> ContentId {
        self.contents[block.index()]
    }

    /// Whether a content's block of a group is there for others to hold.
    pub(super) fn offers(&self, content: ContentId, group: usize) -> bool {
        let block = self.row(content)[group];
        block.is_some() && !self.is_withheld(block)
    }

    /// Whether a content's blocks of all groups are there for others to hold.
    pub(super) fn is_whole(&self, content: ContentId) -> bool {
        let all = 0..self.windows.len();
        self.withheld.is_empty() || all.into_iter().all(|group| self.offers(content, group))
    }

    fn is_withheld(&self, block: BlockId) -> bool {
        self.withheld.get(block.index()).is_some_and(|&withheld| withheld)
    }

    /// Blocks that nobody else may hold yet.
    pub(super) fn withheld(&self) -> impl Iterator<Item = BlockId> + '_ {
        let withheld = self.withheld.iter().enumerate().filter(|(_, withheld)| **withheld);
        withheld.map(|(number, _)| BlockId::new(number as u32))
    }

    pub(super) fn withhold(&mut self, block: BlockId, withheld: bool) {
        self.withheld[block.index()] = withheld;
    }

    /// Puts blocks that hold no content in the places of a content that are empty.
    pub(super) fn fill(&mut self, content: ContentId, row: &[BlockId]) {
        for (group, &block) in row.iter().enumerate() {
            let empty = !self.row(content)[group].is_some();
            if empty && block.is_some() && !self.content(block).is_some() {
                self.row_mut(content)[group] = block;
                self.contents[block.index()] = content;
            }
        }
    }

    /// Whether a content goes on without one of its blocks.
    pub(super) fn stands_without(&self, content: ContentId, block: BlockId) -> bool {
        if self.windows.len() == 1 {
            return false;
        }
        let group = self.row(content).iter().position(|&other| other == block);
        group.is_some_and(|group| group > 0 && self.windows[group].is_some())
    }

    /// Takes a block out of its content, which keeps the others.
    pub(super) fn detach(&mut self, block: BlockId) {
        let content = self.content(block);
        self.contents[block.index()] = ContentId::NONE;
        for entry in self.row_mut(content) {
            if *entry == block {
                *entry = BlockId::NONE;
            }
        }
    }

    /// Takes all blocks out of a content.
    pub(super) fn clear(&mut self, content: ContentId) {
        let groups = self.windows.len();
        let row = &mut self.rows[content.index() * groups..][..groups];
        for block in row.iter_mut().filter(|block| block.is_some()) {
            self.contents[block.index()] = ContentId::NONE;
            *block = BlockId::NONE;
        }
    }

    /// Checks that every block and its content name each other; returns how many blocks do.
    pub(super) fn check(&self) -> Result<usize, Error> {
        let mut named = 0;
        for block in (0..self.contents.len() as u32).map(BlockId::new) {
            let content = self.content(block);
            if content.is_some() {
                named += 1;
                if !self.row(content).contains(&block) {
                    return Err(Error::inconsistent("row", "a block of it", block.index()));
                }
            }
        }
        let rows = self.rows.iter().filter(|block| block.is_some()).count();
        if rows == named { Ok(named) } else { Err(Error::inconsistent("places", named, rows)) }
    }
}
