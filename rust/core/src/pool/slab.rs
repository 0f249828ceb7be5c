//! Slabs: where a group's blocks lie, and which slab an allocation takes them from.

use crate::ids::{BlockId, GroupId};

use super::blocks::Pool;
use super::states::{Block, BlockState, GroupKind, Slab};

impl Pool {
    /// The slabs of a group.
    pub(super) fn slabs_of(&self, group: GroupId) -> impl Iterator<Item = (u16, &Slab)> {
        let slabs = (0..).zip(&self.slabs);
        slabs.filter(move |(_, slab)| slab.owner == Some(group))
    }

    /// Blocks of a slab that are held.
    pub(super) fn held_in(&self, slab: &Slab) -> u32 {
        let blocks = slab.owner.map_or(0, |group| self.groups[group.index()].slab_blocks);
        blocks - slab.free.len() as u32 - slab.cached
    }

    /// The numbers of a slab's blocks.
    pub(super) fn blocks_in(&self, slab: u16) -> std::ops::Range<u32> {
        let slab = &self.slabs[usize::from(slab)];
        let blocks = slab.owner.map_or(0, |group| self.groups[group.index()].slab_blocks);
        slab.first..slab.first + blocks
    }

    /// Cuts an unclaimed slab into blocks of a group; false if there is none.
    pub(super) fn claim_slab(&mut self, group: GroupId) -> bool {
        let Some(number) = self.arena.claim() else { return false };
        let first = self.numbers(group, number);
        let pool = &mut self.groups[group.index()];
        let (pages, blocks) = (pool.pages, pool.slab_blocks);
        pool.total += blocks as usize;
        pool.free += blocks as usize;
        let page = self.arena.first_page(number);
        let slab = &mut self.slabs[usize::from(number)];
        (slab.owner, slab.first) = (Some(group), first);
        for i in (0..blocks).rev() {
            let block = BlockId::new(first + i);
            self.blocks[block.index()] =
                Block { state: BlockState::Free, group, slab: number, ..Block::UNCLAIMED };
            self.pages[block.index()] = (page + i * pages) as i32;
            slab.free.push(block);
        }
        true
    }

    /// The first number for the blocks of a slab: its own range, or for single pages, of which few
    /// slabs are ever cut, one after all of these.
    fn numbers(&mut self, group: GroupId, slab: u16) -> u32 {
        if self.groups[group.index()].kind != GroupKind::SinglePage {
            return u32::from(slab) * self.stride;
        }
        self.single_page_numbers.pop().unwrap_or_else(|| {
            let first = self.blocks.len() as u32;
            let end = self.blocks.len() + self.arena.slab_pages() as usize;
            self.blocks.resize(end, Block::UNCLAIMED);
            self.pages.resize(end, 0);
            first
        })
    }

    /// Hands a slab whose blocks are all free back to the arena.
    pub(super) fn give_slab_back(&mut self, number: u16) {
        let range = self.blocks_in(number);
        let slab = &mut self.slabs[usize::from(number)];
        let Some(group) = slab.owner.take() else { return };
        debug_assert_eq!(slab.free.len(), range.len(), "a slab in use was given back");
        slab.free.clear();
        let pool = &mut self.groups[group.index()];
        pool.free -= range.len();
        pool.total -= range.len();
        if pool.kind == GroupKind::SinglePage {
            self.single_page_numbers.push(range.start);
        }
        for block in range {
            self.blocks[block as usize].state = BlockState::Unclaimed;
        }
        self.arena.give_back(number);
    }

    /// Takes blocks that are free, from the slabs in which most is held: so the others empty, and
    /// an empty slab can serve any group.
    pub(super) fn take(&mut self, group: GroupId, count: usize, out: &mut Vec<BlockId>) {
        let start = out.len();
        while out.len() < start + count {
            let Some(slab) = self.fullest(group, |slab| !slab.free.is_empty()) else {
                debug_assert!(false, "room was promised");
                return;
            };
            let free = &mut self.slabs[usize::from(slab)].free;
            let at = free.len().saturating_sub(start + count - out.len());
            out.extend(free[at..].iter().rev());
            free.truncate(at);
        }
        let pool = &mut self.groups[group.index()];
        pool.free -= count;
        pool.held += count;
        for &block in &out[start..] {
            let entry = &mut self.blocks[block.index()];
            entry.state = BlockState::Held(1);
            entry.owners = 1;
        }
    }

    /// The slab in which most is held, of those of a group that suit.
    pub(super) fn fullest(&self, group: GroupId, suits: impl Fn(&Slab) -> bool) -> Option<u16> {
        let slabs = self.slabs_of(group).filter(|(_, slab)| suits(slab));
        let ranked = slabs.map(|(number, slab)| (self.held_in(slab), std::cmp::Reverse(number)));
        ranked.max().map(|(_, std::cmp::Reverse(number))| number)
    }
}
