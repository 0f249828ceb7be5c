//! Making room: own free blocks, then unclaimed slabs, then the LRU list, then other groups'
//! slabs in which nothing is held.
//!
//! Feasibility is decided before the first change, so a refused call leaves everything as it was.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::blocks::{BlockState, Evict, Pool};

/// What one group could free, seen slab by slab.
#[derive(Default)]
struct Means {
    /// Free and cached blocks in slabs in which something is held.
    in_place: usize,
    /// Slabs in which nothing is held, with their cached blocks.
    whole: Vec<(usize, u32)>,
}

impl Pool {
    /// Brings the free list of every group to at least `rows` blocks.
    pub(super) fn make_room<E: Evict>(&mut self, rows: usize, index: &mut E) -> Result<(), Error> {
        let wanted: usize = self.groups.iter().map(|g| slabs_for(rows, g.free.len(), g)).sum();
        let local = self.groups.iter().all(|g| g.free.len() + g.lru.len() >= rows);
        if wanted > self.arena.unclaimed() && !local {
            self.move_slabs(rows, index)?;
        }
        for group in 0..self.groups.len() {
            let id = GroupId(group as u8);
            let spare = |pool: &Pool| pool.groups[group].free.len() >= rows;
            while !spare(self) && self.claim_slab(id) {}
            while !spare(self) && self.evict_oldest(id, index) {}
            debug_assert!(spare(self), "room was promised");
        }
        Ok(())
    }

    /// Moves whole slabs between groups until each can satisfy itself.
    fn move_slabs<E: Evict>(&mut self, rows: usize, index: &mut E) -> Result<(), Error> {
        let mut means = self.means();
        let needed: Vec<usize> = self
            .groups
            .iter()
            .zip(&means)
            .map(|(group, means)| slabs_for(rows, means.in_place, group))
            .collect();
        let available = self.arena.unclaimed() + means.iter().map(|m| m.whole.len()).sum::<usize>();
        if needed.iter().sum::<usize>() > available {
            return Err(self.shortage(rows, &means, available));
        }
        for (means, &keep) in means.iter_mut().zip(&needed) {
            // The slabs with the fewest cached blocks are given first.
            means.whole.sort_unstable();
            let surplus = means.whole.len().saturating_sub(keep);
            for &(_, slab) in &means.whole[..surplus] {
                self.empty_slab(slab, index);
            }
            means.whole.drain(..surplus);
        }
        for (group, (means, &need)) in means.iter().zip(&needed).enumerate() {
            for _ in means.whole.len()..need {
                self.claim_slab(GroupId(group as u8));
            }
        }
        Ok(())
    }

    fn means(&self) -> Vec<Means> {
        let mut means: Vec<Means> = self.groups.iter().map(|_| Means::default()).collect();
        for slab in 0..self.arena.slabs() as u32 {
            let Some(group) = self.arena.owner(slab) else { continue };
            let (mut held, mut cached) = (0, 0);
            let blocks = self.groups[group.index()].slab_blocks;
            for i in 0..blocks {
                match self.blocks[(slab * self.stride + i) as usize].state {
                    BlockState::Held(_) => held += 1,
                    BlockState::Cached => cached += 1,
                    _ => {}
                }
            }
            let means = &mut means[group.index()];
            if held == 0 {
                means.whole.push((cached, slab));
            } else {
                means.in_place += (blocks - held) as usize;
            }
        }
        means
    }

    fn shortage(&self, rows: usize, means: &[Means], slabs: usize) -> Error {
        let free = self
            .groups
            .iter()
            .zip(means)
            .map(|(group, means)| means.in_place + slabs * group.slab_blocks as usize)
            .min()
            .unwrap_or(0);
        // Groups compete for slabs, so each alone may seem to suffice.
        Error::pool_full("pool", rows, free.min(rows.saturating_sub(1)))
    }

    /// Evicts what a slab caches and hands the slab back to the arena.
    fn empty_slab<E: Evict>(&mut self, slab: u32, index: &mut E) {
        let Some(group) = self.arena.owner(slab) else { return };
        let blocks = self.groups[group.index()].slab_blocks;
        let range = slab * self.stride..slab * self.stride + blocks;
        for block in range.clone().map(BlockId::new) {
            if self.state(block) == BlockState::Cached {
                self.evict(block, index);
            }
        }
        let pool = &mut self.groups[group.index()];
        pool.free.retain(|block| !range.contains(&(block.index() as u32)));
        pool.total -= blocks as usize;
        for block in range {
            self.blocks[block as usize].state = BlockState::Unclaimed;
        }
        self.arena.give_back(slab);
    }
}

fn slabs_for(rows: usize, have: usize, group: &super::blocks::Group) -> usize {
    rows.saturating_sub(have).div_ceil(group.slab_blocks as usize)
}
