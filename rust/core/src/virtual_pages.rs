//! Virtual pages: numbers that somebody else hands out, and the blocks in which their KV lies.
//!
//! A scheduler names pages of tokens; heads of one class keep the KV of a page or give it up while
//! the page lives on. So each class has tables from virtual page to block, and what a class keeps
//! of a page takes as many blocks as the class has parts, all of one size: one free list, and what
//! is free can be had.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::pool::{BlockState, Evict, GroupCounts, Pool};
use crate::reserve::{filled, zeroed};

/// What a class of heads keeps of a virtual page.
pub type ClassPage = (u32, u32);

/// Tables from virtual page to block for classes of heads, over one pool of blocks of equal size.
///
/// Page 0 is nobody's, as is the null block. What is kept has holders; what loses its last holder
/// is free at once or stays, findable, until its blocks are needed.
pub struct VirtualPages {
    pool: Pool,
    tables: Tables,
}

/// Which block each table has for each page, and back.
struct Tables {
    pages: u32,
    /// The first table of each class, and the number of all.
    first: Vec<usize>,
    /// [tables, pages]
    blocks: Vec<BlockId>,
    /// What lies in a block.
    named: Vec<ClassPage>,
    /// [tables, pages]: whether an entry is listed in `changes`.
    changed: Vec<bool>,
    changes: Vec<(u32, u32)>,
    forgotten: Vec<[i32; 2]>,
}

impl Tables {
    fn at(&self, table: usize, page: u32) -> usize {
        table * self.pages as usize + page as usize
    }

    fn range(&self, class: u32) -> std::ops::Range<usize> {
        self.first[class as usize]..self.first[class as usize + 1]
    }

    fn blocks_of(&self, (class, page): ClassPage) -> impl Iterator<Item = BlockId> + '_ {
        self.range(class).map(move |table| self.blocks[self.at(table, page)])
    }

    fn put(&mut self, (class, page): ClassPage, part: usize, block: BlockId) {
        let table = self.range(class).start + part;
        let at = self.at(table, page);
        self.blocks[at] = block;
        if block.is_some() {
            self.named[block.index()] = (class, page);
        }
        if !std::mem::replace(&mut self.changed[at], true) {
            self.changes.push((table as u32, page));
        }
    }

    fn unmap(&mut self, at: ClassPage) {
        for part in 0..self.range(at.0).len() {
            self.put(at, part, BlockId::NONE);
        }
    }
}

impl Evict for Tables {
    fn evicted(&mut self, block: BlockId, forgotten: &mut Vec<BlockId>) {
        let at = self.named[block.index()];
        forgotten.extend(self.blocks_of(at).filter(|&other| other != block));
        self.unmap(at);
        self.forgotten.push([at.0 as i32, at.1 as i32]);
    }
}

impl VirtualPages {
    /// Tables for `pages` virtual pages, over an arena cut into blocks of `block_pages`; `parts`
    /// says how many blocks each class takes for a page.
    ///
    /// # Errors
    /// `InvalidArgument` for no class, a class without parts, no page beside page 0, numbers that
    /// do not fit i32, `OutOfMemory` where the tables find no room, and as [`Pool::new`].
    pub fn new(
        pages: u32,
        arena_pages: u64,
        block_pages: u32,
        parts: &[u32],
    ) -> Result<VirtualPages, Error> {
        let total: u64 = parts.iter().map(|&part| u64::from(part)).sum();
        if parts.is_empty() || parts.contains(&0) || total > u64::from(u16::MAX) {
            let expected = "classes of at least one part, 65535 in all";
            return Err(Error::invalid("parts", expected, format!("{parts:?}")));
        }
        if pages < 2 || pages > i32::MAX as u32 {
            return Err(Error::invalid("virtual pages", "2 <= pages <= 2147483647", pages));
        }
        let pool = Pool::new(arena_pages, None, &[block_pages])?;
        let mut first = vec![0];
        for &part in parts {
            first.push(first[first.len() - 1] + part as usize);
        }
        let entries = total as usize * pages as usize;
        let tables = Tables {
            pages,
            first,
            blocks: filled("tables of virtual pages", BlockId::NONE, entries)?,
            named: filled("pages of blocks", (0, 0), pool.capacity())?,
            changed: zeroed("changes of virtual pages", entries)?,
            changes: Vec::new(),
            forgotten: Vec::new(),
        };
        Ok(VirtualPages { pool, tables })
    }

    /// Blocks by state.
    #[must_use]
    pub fn counts(&self) -> GroupCounts {
        self.pool.counts(GroupId(0))
    }

    /// Whether a class keeps a page, held or not.
    ///
    /// # Errors
    /// `OutOfRange` for a class or page that there is not.
    pub fn is_kept(&self, at: ClassPage) -> Result<bool, Error> {
        self.inside(&[at])?;
        Ok(self.tables.blocks_of(at).all(BlockId::is_some))
    }

    /// Blocks that could be had for all but `spared`: free ones, and those that nobody holds.
    ///
    /// # Errors
    /// As [`Self::is_kept`].
    pub fn room_beside(&self, spared: &[ClassPage]) -> Result<usize, Error> {
        self.inside(spared)?;
        let counts = self.counts();
        let blocks = spared.iter().flat_map(|&at| self.tables.blocks_of(at));
        let cached =
            blocks.filter(|block| block.is_some() && self.pool.state(*block) == BlockState::Cached);
        Ok(counts.free + counts.cached - cached.count())
    }

    /// Blocks that nobody would hold any more if each of these pages lost a holder.
    ///
    /// # Errors
    /// As [`Self::is_kept`].
    pub fn held_alone(&self, pages: &[ClassPage]) -> Result<usize, Error> {
        self.inside(pages)?;
        let alone = pages.iter().filter(|&&at| self.holders(at) == 1);
        Ok(alone.map(|at| self.tables.range(at.0).len()).sum())
    }

    /// Gives these pages blocks and a holder, all or nothing; what was kept of them is void.
    ///
    /// # Errors
    /// `PoolFull`; `InvalidArgument` for a page named twice or held by somebody, `OutOfRange`.
    /// Nothing has changed then.
    pub fn take(&mut self, pages: &[ClassPage]) -> Result<(), Error> {
        self.distinct(pages)?;
        if let Some(at) = pages.iter().find(|&&at| self.holders(at) > 0) {
            return Err(Error::invalid("pages", "pages that nobody holds", format!("{at:?}")));
        }
        let needed = pages.iter().map(|at| self.tables.range(at.0).len()).sum();
        let room = self.room_beside(&[])?;
        if needed > room {
            return Err(Error::pool_full("virtual pages", needed, room));
        }
        for &at in pages {
            self.drop_blocks(at);
        }
        let mut blocks = Vec::with_capacity(needed);
        self.pool.allocate(&[needed], &mut self.tables, &mut blocks)?;
        self.pool.disown(&blocks);
        let mut blocks = blocks.into_iter();
        for &at in pages {
            for (part, block) in (0..self.tables.range(at.0).len()).zip(&mut blocks) {
                self.tables.put(at, part, block);
            }
        }
        Ok(())
    }

    /// Adds a holder to each of these pages.
    ///
    /// # Errors
    /// `InvalidArgument` for a page named twice or not kept, `OutOfRange`. Nothing has changed
    /// then.
    pub fn hold(&mut self, pages: &[ClassPage]) -> Result<(), Error> {
        self.distinct(pages)?;
        for &at in pages {
            if !self.is_kept(at)? {
                return Err(Error::invalid("pages", "pages that are kept", format!("{at:?}")));
            }
        }
        let blocks: Vec<BlockId> = pages.iter().flat_map(|&at| self.tables.blocks_of(at)).collect();
        self.pool.hold(&blocks);
        Ok(())
    }

    /// Removes a holder of each of these pages. What loses its last stays if `keep` says so, until
    /// its blocks are needed: the last of `pages` go first.
    ///
    /// # Errors
    /// `InvalidArgument` for a page named twice or held by nobody, `OutOfRange`. Nothing has
    /// changed then.
    pub fn release(&mut self, pages: &[ClassPage], keep: bool) -> Result<(), Error> {
        self.distinct(pages)?;
        if let Some(at) = pages.iter().find(|&&at| self.holders(at) == 0) {
            return Err(Error::invalid("pages", "pages that are held", format!("{at:?}")));
        }
        let mut released = Vec::new();
        for &at in pages {
            let start = released.len();
            released.extend(self.tables.blocks_of(at));
            let blocks = &released[start..];
            if keep {
                self.pool.mark_indexed(blocks);
            } else if self.holders(at) == 1 {
                blocks.iter().for_each(|&block| self.pool.unindex(block));
                self.tables.unmap(at);
            }
        }
        self.pool.release(&released);
        Ok(())
    }

    /// What changed in the tables since this was last asked: (table, page, arena page of the block,
    /// 0 for none), each entry once.
    pub fn take_changes(&mut self) -> Vec<[i32; 3]> {
        let changes = std::mem::take(&mut self.tables.changes);
        let row = |(table, page): (u32, u32)| {
            let at = self.tables.at(table as usize, page);
            self.tables.changed[at] = false;
            let block = self.tables.blocks[at];
            let first = if block.is_some() { self.pool.page(block) } else { 0 };
            [table as i32, page as i32, first]
        };
        changes.into_iter().map(row).collect()
    }

    /// (class, page) of what was kept and had to go since this was last asked.
    pub fn take_forgotten(&mut self) -> Vec<[i32; 2]> {
        std::mem::take(&mut self.tables.forgotten)
    }

    /// Recounts everything.
    ///
    /// # Errors
    /// `Inconsistent` for books that do not balance, or tables that do not agree with them.
    pub fn check(&self) -> Result<(), Error> {
        self.pool.check()?;
        let counts = self.counts();
        let mut mapped = 0;
        for class in 0..self.tables.first.len() as u32 - 1 {
            for page in 0..self.tables.pages {
                for block in self.tables.blocks_of((class, page)).filter(|block| block.is_some()) {
                    mapped += 1;
                    let named = self.tables.named[block.index()];
                    let void = self.pool.state(block) == BlockState::Free;
                    if named != (class, page) || void {
                        let expected = format!("{:?}, stored", (class, page));
                        return Err(Error::inconsistent("tables", expected, format!("{named:?}")));
                    }
                }
            }
        }
        let stored = counts.held + counts.cached;
        if mapped == stored { Ok(()) } else { Err(Error::inconsistent("blocks", stored, mapped)) }
    }

    fn holders(&self, at: ClassPage) -> u32 {
        let first = self.tables.blocks_of(at).next();
        first.filter(|block| block.is_some()).map_or(0, |block| self.pool.references(block))
    }

    fn drop_blocks(&mut self, at: ClassPage) {
        let blocks: Vec<BlockId> =
            self.tables.blocks_of(at).filter(|block| block.is_some()).collect();
        for block in blocks {
            self.pool.unindex(block);
        }
        self.tables.unmap(at);
    }

    fn inside(&self, pages: &[ClassPage]) -> Result<(), Error> {
        let classes = self.tables.first.len() as u32 - 1;
        let outside = |&&(class, page): &&ClassPage| {
            class >= classes || page == 0 || page >= self.tables.pages
        };
        pages.iter().find(outside).map_or(Ok(()), |at| {
            let last = self.tables.pages - 1;
            let expected = format!("classes below {classes}, pages from 1 to {last}");
            Err(Error::out_of_range("virtual page", expected, format!("{at:?}")))
        })
    }

    fn distinct(&self, pages: &[ClassPage]) -> Result<(), Error> {
        self.inside(pages)?;
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => {
                Err(Error::invalid("pages", "each page once", format!("{:?} twice", pair[0])))
            }
            None => Ok(()),
        }
    }
}
