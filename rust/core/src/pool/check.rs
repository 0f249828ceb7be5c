//! Law 1: free + held + cached = total, per group and over the arena.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::blocks::Pool;
use super::states::{BlockState, Group};

impl Pool {
    /// Recounts every block and compares with the books.
    ///
    /// # Errors
    /// `Inconsistent` naming the first count that does not agree.
    pub fn check(&self) -> Result<(), Error> {
        let mut claimed = 0;
        for (index, group) in self.groups.iter().enumerate() {
            claimed += self.check_group(GroupId(index as u8), group)?;
        }
        agree("slabs", self.arena.slabs(), claimed + self.arena.unclaimed())?;
        let covered = self.slab_pages_total() + u64::from(self.arena.null_pages());
        if covered > u64::from(self.arena.pages()) {
            return Err(Error::inconsistent("pages in slabs", self.arena.pages(), covered));
        }
        let marked = self.blocks.iter().filter(|block| block.pinned).count();
        let pinned = |block: BlockId| self.blocks[block.index()].pinned;
        self.pins.check(marked, |block| (self.references(block), pinned(block)))
    }

    fn check_group(&self, id: GroupId, group: &Group) -> Result<usize, Error> {
        let name = |what: &str| format!("group {} {what}", id.0);
        let (mut free, mut held, mut cached, mut slabs) = (0, 0, 0, 0);
        for (number, slab) in self.slabs_of(id) {
            slabs += 1;
            let before = (free, cached);
            for block in self.blocks_in(number) {
                let block = &self.blocks[block as usize];
                if block.slab != number || block.group != id {
                    return Err(Error::inconsistent(name("slab"), number, block.slab));
                }
                match block.state {
                    BlockState::Free => free += 1,
                    BlockState::Cached => cached += 1,
                    BlockState::Held(n) => {
                        held += 1;
                        if n == 0 || block.owners > n {
                            return Err(Error::inconsistent(name("owners"), n, block.owners));
                        }
                    }
                    BlockState::Unclaimed => {
                        return Err(Error::inconsistent(name("block"), "claimed", "unclaimed"));
                    }
                }
                let named = block.indexed == (block.state == BlockState::Cached);
                if !named && !matches!(block.state, BlockState::Held(_)) {
                    return Err(Error::inconsistent(name("index mark"), "cached", "free"));
                }
            }
            agree(&name("free in a slab"), free - before.0, slab.free.len())?;
            agree(&name("cached in a slab"), cached - before.1, slab.cached as usize)?;
        }
        agree(&name("free"), free, group.free)?;
        agree(&name("held"), held, group.held)?;
        agree(&name("cached"), cached, group.cached)?;
        agree(&name("total"), group.total, free + held + cached)?;
        agree(&name("total"), group.total, slabs * group.slab_blocks as usize)?;
        self.check_lists(id, group)?;
        Ok(slabs)
    }

    fn check_lists(&self, id: GroupId, group: &Group) -> Result<(), Error> {
        for &block in self.slabs_of(id).flat_map(|(_, slab)| &slab.free) {
            if self.state(block) != BlockState::Free {
                return Err(Error::inconsistent("free list", "a free block", block.index()));
            }
        }
        let order = self.order.in_order(id);
        for &(_, block) in &order {
            let entry = &self.blocks[block.index()];
            if entry.state != BlockState::Cached || entry.group != id {
                return Err(Error::inconsistent("order", "a cached block", block.index()));
            }
        }
        let first = order.first().map(|&(_, block)| block);
        match self.order.quotas() {
            Some(quotas) => quotas.check(id, &order)?,
            None if self.order.next(id) != first => {
                return Err(Error::inconsistent("order", "its first block next", "another"));
            }
            None => {}
        }
        agree("order", group.cached, order.len())
    }
}

fn agree(what: &str, expected: usize, got: usize) -> Result<(), Error> {
    if expected == got { Ok(()) } else { Err(Error::inconsistent(what, expected, got)) }
}
