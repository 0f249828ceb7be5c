//! Making blocks private before they are written.

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::pool::SharedBlocks;
use crate::tier::Transfer;

use super::books::{Common, State};
use super::freeze;
use super::holding::{Holding, copy_of};
use super::request::Request;

impl Request {
    /// Makes the blocks of these positions private, in one head group or in all: what donors or a
    /// fork's other side hold in them is to be copied by [`Self::take_copies_of`] before anything
    /// is written. Copies nothing where the blocks are private already, as always in materialise
    /// mode without forks, and where a window group keeps nothing.
    ///
    /// # Errors
    /// `OutOfRange`, `NotWritable` for the exact prefix and committed positions, `InvalidArgument`
    /// where some KV was spilled, `PoolFull`. Nothing has changed then.
    pub fn make_writable(
        &mut self,
        positions: &[i32],
        group: Option<GroupId>,
    ) -> Result<(), Error> {
        let groups = match group {
            Some(group) => {
                self.check_group(group)?;
                group.index()..group.index() + 1
            }
            None => 0..self.common.groups.len(),
        };
        self.resident("make_writable")?;
        let page = self.common.page_tokens();
        let mut touched = Vec::with_capacity(positions.len());
        for &position in positions {
            let at = self.position(position)?;
            if at / page < self.read_only || at < self.committed {
                return Err(self.not_writable(groups.start, at));
            }
            touched.push(at / page);
        }
        touched.sort_unstable();
        touched.dedup();
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let mut needs = vec![0; stored.pool.group_count()];
        let mut changes = Vec::with_capacity(groups.len());
        for group in groups {
            let held = &self.holdings[group];
            let is_shared = |b: &usize| held.table.own(*b).is_none() || held.is_forked(&stored, *b);
            let kept = |b: &usize| held.window.is_none() || held.reads(*b);
            let blocks: Vec<usize> =
                touched.iter().copied().filter(kept).filter(is_shared).collect();
            let moved =
                |b: &&usize| held.table.block(**b).is_none() || held.is_forked(&stored, **b);
            needs[group] = blocks.iter().filter(moved).count();
            changes.push((group, blocks));
        }
        let mut fresh = Vec::new();
        let state = &mut *stored;
        freeze::allocate(&common, state, &needs, &mut fresh)?;
        let (mut fresh, len) = (fresh.into_iter(), self.len());
        self.revision += 1;
        for (group, blocks) in changes {
            let held = &mut self.holdings[group];
            held.chunk_blocks += needs[group];
            let mut replaced = Vec::new();
            for &b in &blocks {
                let moves = held.table.block(b).is_none() || held.is_forked(state, b);
                if moves && let Some(block) = fresh.next() {
                    replaced.extend(held.move_block(b, block, state.pool.page(block), len));
                }
                held.copy_donors(b);
            }
            // All at once: a prompt has as many donors as blocks.
            let spans: Vec<_> = blocks.iter().map(|&b| held.table.span(b)).collect();
            held.table.uncover(&spans);
            held.retire(&common, state, &replaced);
        }
        Ok(())
    }

    pub(super) fn check_group(&self, group: GroupId) -> Result<(), Error> {
        let groups = self.common.groups.len();
        if group.index() >= groups {
            return Err(Error::out_of_range("head group", format!("group < {groups}"), group.0));
        }
        Ok(())
    }
}

impl Holding {
    /// Whether anything of grid block `b` is read: from a block or a donor.
    fn reads(&self, b: usize) -> bool {
        let donors = || self.table.donors_in(self.table.span(b)).next().is_some();
        self.table.block(b).is_some() || donors()
    }

    /// Puts a fresh block in place of grid block `b` and plans the copy of what was stored there
    /// of [0, len). Returns the block that stood there.
    pub(super) fn move_block(
        &mut self,
        b: usize,
        block: BlockId,
        page: i32,
        len: usize,
    ) -> Option<BlockId> {
        let old = self.table.block(b);
        let span = self.table.span(b);
        if old.is_some() {
            for run in self.stored_runs(span.start..len.min(span.end)) {
                let (slot, count) = ((run.start - span.start) as u32, run.len() as u32);
                let old = (self.table.page(b), slot);
                self.copies.push(Transfer { from: old, to: (page, slot), tokens: count, delta: 0 });
            }
        }
        self.table.set(b, block, page);
        self.private.extend(&[block]);
        old
    }

    /// Plans the copy of what donors hold of grid block `b` into it.
    fn copy_donors(&mut self, b: usize) {
        let span = self.table.span(b);
        for donor in self.table.donors_in(span.clone()) {
            self.copies.push(copy_of(&donor, &span, self.table.page(b)));
        }
    }

    /// Keeps blocks that were copied away from until the copies are done.
    pub(super) fn retire(&mut self, common: &Common, state: &mut State, replaced: &[BlockId]) {
        if !replaced.is_empty() {
            let held = self.private.part_with(replaced);
            state.pool.disown(&held);
            self.replaced.push(SharedBlocks::adopt(&common.store, held));
        }
    }
}
