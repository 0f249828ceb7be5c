//! What a request holds in one head group: table, blocks, and copies to be made.

use std::ops::Range;
use std::sync::Arc;

use crate::content::Index;
use crate::heads::LocalWindow;
use crate::ids::{BlockId, GroupId};
use crate::plan::{BlockTable, DonorRange, donors_in};
use crate::pool::{SharedBlocks, Store, WritableBlocks};
use crate::tier::{Transfer, TransferPlan};

use super::books::State;

/// The blocks of one request in one head group, or of one promoted head.
pub(super) struct Holding {
    /// The pool's group.
    pub(super) group: GroupId,
    /// What the group keeps; `None` for all tokens.
    pub(super) window: Option<LocalWindow>,
    pub(super) table: BlockTable,
    /// What is to be copied before the table is read.
    pub(super) copies: TransferPlan,
    /// Reused positions whose blocks have no memory yet, in order.
    pub(super) pieces: Vec<DonorRange>,
    /// Grid blocks before this one are only kept for the sink.
    pub(super) passed: usize,
    /// Blocks that a prefill in chunks may need at once.
    pub(super) chunk_blocks: usize,
    /// Whether a part that was stored, or found in the prefix, is no longer in the table.
    pub(super) lost: bool,
    /// Whether the table no longer has the KV of every head of the group.
    pub(super) promoted_from: bool,
    /// Dropped before the prefix, so that the tail is evicted before it.
    pub(super) private: WritableBlocks<Index>,
    /// Private blocks that are in no table yet.
    pub(super) spare: WritableBlocks<Index>,
    /// Entries at the start whose KV lies in the host's memory, and the tokens that these list.
    pub(super) spilled: usize,
    pub(super) away: usize,
    /// Private blocks in their place, which no table lists.
    pub(super) slots: WritableBlocks<Index>,
    /// Blocks that were copied away from, held until the copies are done.
    pub(super) replaced: Vec<SharedBlocks<Index>>,
    pub(super) donors: SharedBlocks<Index>,
    pub(super) prefix: SharedBlocks<Index>,
}

impl Holding {
    /// Nothing, of one group.
    pub(super) fn new(
        store: &Arc<Store<Index>>,
        group: GroupId,
        window: Option<LocalWindow>,
        page_tokens: usize,
    ) -> Holding {
        Holding {
            group,
            window,
            table: BlockTable::new(page_tokens),
            copies: TransferPlan::default(),
            pieces: Vec::new(),
            passed: 0,
            chunk_blocks: 0,
            lost: false,
            promoted_from: false,
            private: WritableBlocks::adopt(store, Vec::new()),
            spare: WritableBlocks::adopt(store, Vec::new()),
            spilled: 0,
            away: 0,
            slots: WritableBlocks::adopt(store, Vec::new()),
            replaced: Vec::new(),
            donors: SharedBlocks::adopt(store, Vec::new()),
            prefix: SharedBlocks::adopt(store, Vec::new()),
        }
    }

    /// The same table on the same blocks, each with one more owner; nothing of it is spilled.
    pub(super) fn fork(&self, store: &Arc<Store<Index>>) -> Holding {
        Holding {
            group: self.group,
            window: self.window,
            table: self.table.clone(),
            copies: TransferPlan::default(),
            pieces: self.pieces.clone(),
            passed: self.passed,
            chunk_blocks: 0,
            lost: self.lost,
            promoted_from: self.promoted_from,
            private: self.private.fork(),
            spare: WritableBlocks::adopt(store, Vec::new()),
            spilled: 0,
            away: 0,
            slots: WritableBlocks::adopt(store, Vec::new()),
            replaced: Vec::new(),
            donors: self.donors.clone(),
            prefix: self.prefix.clone(),
        }
    }

    /// Blocks that this request alone pays for.
    pub(super) fn own_blocks(&self) -> usize {
        let guards = [&self.private, &self.spare, &self.slots];
        guards.iter().map(|guard| guard.blocks().len()).sum()
    }

    /// Blocks that are read together with others.
    pub(super) fn shared_blocks(&self) -> usize {
        self.prefix.blocks().len() + self.donors.blocks().len()
    }

    /// Whether another request may write grid block `b` too.
    pub(super) fn is_forked(&self, state: &State, b: usize) -> bool {
        self.table.block(b).is_some_and(|block| state.pool.owners(block) > 1)
    }

    /// Gives grid block `b`, which is absent, memory, and plans the copies of what is reused in it.
    pub(super) fn place(&mut self, b: usize, block: BlockId, page: i32) {
        self.table.set(b, block, page);
        for piece in donors_in(&self.pieces, self.table.span(b)) {
            self.copies.push(copy_of(&piece, &self.table.span(b), page));
        }
    }

    /// Forgets pieces of which all blocks before grid block `b` have been placed.
    pub(super) fn placed(&mut self, b: usize) {
        let end = self.table.span(b).start;
        self.pieces.retain(|piece| piece.end > end);
    }

    /// Grid blocks from `from` on that rows [rows.start, rows.end) see or write and that have
    /// neither memory nor a donor, in order. `len` is the request's length.
    pub(super) fn lacking(&self, rows: &Range<usize>, from: usize, len: usize) -> Vec<usize> {
        let page = self.table.span(0).len();
        let end = rows.end.div_ceil(page);
        let (sink, first) = match self.window {
            Some(window) => (window.sink.min(rows.end).div_ceil(page), window.first(rows.start)),
            None => (0, rows.start),
        };
        let late = (first / page).max(sink)..end;
        let all = (0..sink).chain(late).filter(|&b| b >= from);
        all.filter(|&b| self.table.lacks(b, &(b * page..len.min((b + 1) * page)))).collect()
    }

    /// Lets go of donors that nothing refers to any more; returns them, still held.
    pub(super) fn drop_donors(&mut self) -> Vec<BlockId> {
        let ranges = self.table.donors().iter().chain(&self.pieces);
        if ranges.clone().next().is_none() {
            return self.donors.take_all();
        }
        let mut used: Vec<BlockId> = ranges.map(|range| range.donor).collect();
        used.sort_unstable();
        let unused = |block: &&BlockId| used.binary_search(block).is_err();
        let gone: Vec<BlockId> = self.donors.blocks().iter().filter(unused).copied().collect();
        self.donors.part_with(&gone)
    }

    /// The parts of a range that no donor covers.
    pub(super) fn stored_runs(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut runs = Vec::new();
        let mut at = range.start;
        for donor in self.table.donors_in(range.clone()) {
            runs.push(at..donor.start);
            at = donor.end;
        }
        runs.push(at..range.end);
        runs.retain(|run| !run.is_empty());
        runs
    }
}

/// The copy of a donor's slots, all inside one grid block, to the page of that block.
pub(super) fn copy_of(from: &DonorRange, span: &Range<usize>, page: i32) -> Transfer {
    let tokens = (from.end - from.start) as u32;
    let slot = (from.start - span.start) as u32;
    Transfer { from: (from.page, from.begin), to: (page, slot), tokens, delta: from.delta }
}
