//! Making room: own free blocks, then unclaimed slabs, then slabs of other groups in which
//! nothing is stored, then cached blocks in their order, then other groups' slabs in which nothing
//! is held.
//!
//! Feasibility is decided before the first change, so a refused call leaves everything as it was.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::blocks::Pool;
use super::states::{BlockState, Evict, Group, GroupKind, Slab};

/// What one group could free, seen slab by slab.
#[derive(Default)]
struct Means {
    /// Free and cached blocks in slabs in which something is held.
    in_place: usize,
    /// Slabs in which nothing is held, with their cached blocks.
    whole: Vec<(u32, u16)>,
}

impl Pool {
    /// Brings the free blocks of every group to at least the number it needs.
    pub(super) fn make_room<E: Evict>(
        &mut self,
        needs: &[usize],
        index: &mut E,
    ) -> Result<(), Error> {
        if self.slabs_wanted(needs) > self.arena.unclaimed() {
            let local = self.each(needs).all(|(g, need)| g.free + g.cached >= need);
            if !local {
                self.feasible(needs)?;
            }
            self.give_void_slabs_back(needs);
            if !local && self.slabs_wanted(needs) > self.arena.unclaimed() {
                self.move_slabs(needs, index);
            }
        }
        for (group, &need) in (0..).map(GroupId).zip(needs) {
            match self.groups[group.index()].kind {
                GroupKind::Window => self.make_room_in_place(group, need, index),
                _ => self.make_room_anywhere(group, need, index),
            }
            debug_assert!(self.groups[group.index()].free >= need, "room was promised");
        }
        Ok(())
    }

    /// Whether [`Pool::allocate`] would find so many blocks of each group.
    #[must_use]
    pub fn fits(&self, needs: &[usize]) -> bool {
        self.require(needs).is_ok()
    }

    /// Refuses what [`Pool::allocate`] would refuse. Changes nothing.
    ///
    /// # Errors
    /// `PoolFull` as there.
    pub fn require(&self, needs: &[usize]) -> Result<(), Error> {
        let at_hand = self.slabs_wanted(needs) <= self.arena.unclaimed()
            || self.each(needs).all(|(g, need)| g.free + g.cached >= need);
        if at_hand { Ok(()) } else { self.feasible(needs) }
    }

    /// The blocks that are cached and that somebody asks for.
    pub(crate) fn cached_blocks(&self, wanted: impl Fn(BlockId) -> bool) -> Vec<BlockId> {
        let blocks = (0..self.blocks.len() as u32).map(BlockId::new);
        blocks.filter(|&block| self.is_cached(block) && wanted(block)).collect()
    }

    /// Whether nobody holds a block and its content can be found.
    pub(crate) fn is_cached(&self, block: BlockId) -> bool {
        self.state(block) == BlockState::Cached
    }

    /// Whether an empty arena would have slabs for so many blocks of each group.
    #[must_use]
    pub fn could_hold(&self, needs: &[usize]) -> bool {
        let slabs: usize = self.each(needs).map(|(group, need)| slabs_for(need, 0, group)).sum();
        slabs <= self.arena.slabs()
    }

    fn each<'a>(&'a self, needs: &'a [usize]) -> impl Iterator<Item = (&'a Group, usize)> {
        self.groups.iter().zip(needs.iter().copied())
    }

    /// Slabs that it takes beside what is free.
    fn slabs_wanted(&self, needs: &[usize]) -> usize {
        self.each(needs).map(|(group, need)| slabs_for(need, group.free, group)).sum()
    }

    fn short_of(&self, group: GroupId, need: usize) -> bool {
        self.groups[group.index()].free < need
    }

    fn make_room_anywhere<E: Evict>(&mut self, group: GroupId, need: usize, index: &mut E) {
        while self.short_of(group, need) && self.claim_slab(group) {}
        while self.short_of(group, need) && self.evict_next(group, index) {}
    }

    /// The same for blocks of which most are soon given up: what is held for long then lies in
    /// few slabs, and the others can serve any group. While half of the arena is unclaimed, what
    /// is cached is worth more than that.
    fn make_room_in_place<E: Evict>(&mut self, group: GroupId, need: usize, index: &mut E) {
        let plenty = |pool: &Pool| 2 * pool.arena.unclaimed() > pool.arena.slabs();
        while self.short_of(group, need) && plenty(self) && self.claim_slab(group) {}
        while self.short_of(group, need) {
            let partly = |slab: &Slab| slab.cached > 0 && self.held_in(slab) > 0;
            let Some(slab) = self.fullest(group, partly) else { break };
            for block in self.blocks_in(slab).map(BlockId::new) {
                if self.short_of(group, need) && self.state(block) == BlockState::Cached {
                    self.evict(block, index);
                }
            }
        }
        self.make_room_anywhere(group, need, index);
    }

    /// Whether whole slabs could move between groups until each can satisfy itself.
    fn feasible(&self, needs: &[usize]) -> Result<(), Error> {
        let means = self.means();
        let wanted: usize = self.lacking(needs, &means).iter().sum();
        let whole: usize = means.iter().map(|means| means.whole.len()).sum();
        let available = self.arena.unclaimed() + whole;
        if wanted > available { Err(self.shortage(needs, &means, available)) } else { Ok(()) }
    }

    /// Slabs that each group needs beside those in which it holds something.
    fn lacking(&self, needs: &[usize], means: &[Means]) -> Vec<usize> {
        let each = self.each(needs).zip(means);
        each.map(|((group, need), means)| slabs_for(need, means.in_place, group)).collect()
    }

    /// Hands back slabs in which nothing is stored and that their group does not need itself.
    fn give_void_slabs_back(&mut self, needs: &[usize]) {
        if self.groups.len() == 1 {
            return;
        }
        for slab in 0..self.slabs.len() as u16 {
            let Some(group) = self.slabs[usize::from(slab)].owner else { continue };
            let pool = &self.groups[group.index()];
            let void = self.slabs[usize::from(slab)].free.len() == pool.slab_blocks as usize;
            if void && pool.free >= needs[group.index()] + pool.slab_blocks as usize {
                self.give_slab_back(slab);
            }
        }
    }

    /// Moves whole slabs between groups until each can satisfy itself.
    fn move_slabs<E: Evict>(&mut self, needs: &[usize], index: &mut E) {
        let mut means = self.means();
        let lacking = self.lacking(needs, &means);
        for (means, &keep) in means.iter_mut().zip(&lacking) {
            // The slabs with the fewest cached blocks are given first.
            means.whole.sort_unstable();
            let surplus = means.whole.len().saturating_sub(keep);
            for &(_, slab) in &means.whole[..surplus] {
                self.empty_slab(slab, index);
            }
            means.whole.drain(..surplus);
        }
        for (group, (means, &need)) in (0..).map(GroupId).zip(means.iter().zip(&lacking)) {
            for _ in means.whole.len()..need {
                self.claim_slab(group);
            }
        }
    }

    fn means(&self) -> Vec<Means> {
        let mut means: Vec<Means> = self.groups.iter().map(|_| Means::default()).collect();
        for (number, slab) in (0..).zip(&self.slabs) {
            let Some(group) = slab.owner else { continue };
            let means = &mut means[group.index()];
            if self.held_in(slab) == 0 {
                means.whole.push((slab.cached, number));
            } else {
                means.in_place += slab.free.len() + slab.cached as usize;
            }
        }
        means
    }

    /// Names the group that lacks most. Groups compete for slabs, so each alone may seem to
    /// suffice.
    fn shortage(&self, needs: &[usize], means: &[Means], slabs: usize) -> Error {
        let (mut needed, mut free) = (0, 0);
        for ((group, need), means) in self.each(needs).zip(means) {
            let have = means.in_place + slabs * group.slab_blocks as usize;
            if need > 0 && (needed == 0 || need * free < needed * have) {
                (needed, free) = (need, have);
            }
        }
        Error::pool_full("pool", needed, free.min(needed.saturating_sub(1)))
    }

    /// Evicts what a slab caches and hands the slab back to the arena.
    fn empty_slab<E: Evict>(&mut self, slab: u16, index: &mut E) {
        for block in self.blocks_in(slab).map(BlockId::new) {
            if self.state(block) == BlockState::Cached {
                self.evict(block, index);
            }
        }
        self.give_slab_back(slab);
    }
}

fn slabs_for(need: usize, have: usize, group: &Group) -> usize {
    need.saturating_sub(have).div_ceil(group.slab_blocks as usize)
}
