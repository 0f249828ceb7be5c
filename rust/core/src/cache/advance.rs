//! Moving on: window groups let go of what no coming row sees, and take blocks for those that come.

use std::ops::Range;

use crate::error::Error;
use crate::ids::BlockId;
use crate::plan::Window;
use crate::pool::Stored;
use crate::segment::Index;

use super::holding::Holding;
use super::request::Request;
use super::{Shared, freeze};

type State = Stored<Index>;

/// What is to change in one table.
struct Change {
    /// Grid blocks that no coming row sees.
    passed: Vec<usize>,
    /// Their blocks: those that this request can use again at once, other private ones, those of
    /// the prefix.
    again: Vec<BlockId>,
    private: Vec<BlockId>,
    prefix: Vec<BlockId>,
    /// Grid blocks that get memory, some of them beyond the table.
    lacking: Vec<usize>,
    /// Grid blocks that a fork may write too, and that are written.
    forked: Vec<usize>,
}

impl Change {
    /// Blocks that the pool must give.
    fn need(&self, held: &Holding) -> usize {
        let wanted = self.lacking.len() + self.forked.len();
        wanted.saturating_sub(self.again.len() + held.spare.blocks().len())
    }
}

impl Request {
    /// Says that rows before `start` are done and that [start, end) come next. Window groups let
    /// go of what no row from `start` on sees (it stays cached if it is committed), and have room
    /// for the rows that come; what they reuse there is to be copied, see
    /// [`Self::take_copies_of`].
    ///
    /// Never fails for a range of at most the `chunk_tokens` of the admission. When `start` is the
    /// prompt's end, only what the next token sees is kept.
    ///
    /// # Errors
    /// `OutOfRange` unless start <= end <= len and start is not before that of an earlier call,
    /// `PoolFull` for a longer range than was reckoned with. Nothing has changed then.
    pub fn advance(&mut self, start: usize, end: usize) -> Result<(), Error> {
        if start < self.front || start > end || end > self.len() {
            let expected = format!("{} <= start <= end <= {}", self.front, self.len());
            return Err(Error::out_of_range("advance", expected, format!("[{start}, {end})")));
        }
        let shared = self.shared.clone();
        let mut stored = shared.store.lock();
        self.slide(&shared, &mut stored, start..end, self.len())
    }

    /// Appends generated tokens and makes room for their KV, all or nothing; rows before them are
    /// done. If a fork shares the last block, it is copied first: see [`Self::take_copies`].
    ///
    /// # Errors
    /// `PoolFull`, or `InvalidArgument` above 2^31 positions. Nothing has changed then.
    pub fn append(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let len = self.len() + tokens.len();
        if i32::try_from(len).is_err() {
            return Err(Error::invalid("append", "at most 2147483647 positions", len));
        }
        if tokens.is_empty() {
            return Ok(());
        }
        let shared = self.shared.clone();
        let mut stored = shared.store.lock();
        self.slide(&shared, &mut stored, self.len()..len, len)?;
        drop(stored);
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// All or nothing: rows before `rows` are done, `rows` come next, the length becomes `len`.
    fn slide(
        &mut self,
        shared: &Shared,
        state: &mut State,
        rows: Range<usize>,
        len: usize,
    ) -> Result<(), Error> {
        let appended = self.len()..len;
        let change = |held: &Holding| {
            let mut change = held.change(state, &rows, self.read_only, len);
            change.forked = held.forked(state, &appended);
            change
        };
        let changes: Vec<Change> = self.holdings.iter().map(change).collect();
        let mut needs = vec![0; state.pool.group_count()];
        for (held, change) in self.holdings.iter().zip(&changes) {
            needs[held.group.index()] += change.need(held);
        }
        for change in &changes {
            state.pool.disown(&change.private);
            state.pool.release(&change.private);
            state.pool.release(&change.prefix);
        }
        let mut fresh = Vec::new();
        freeze::relieve(shared, state, &needs);
        if let Err(error) = state.pool.allocate(&needs, &mut state.index, &mut fresh) {
            for change in &changes {
                state.pool.hold_as_owner(&change.private);
                state.pool.hold(&change.prefix);
            }
            return Err(error);
        }
        self.front = rows.start;
        let ends = self.in_chunks && rows.start >= self.plan.tokens;
        self.in_chunks &= !ends;
        let reserve = self.reserved.div_ceil(shared.page_tokens());
        let reserve = reserve.saturating_sub(len.div_ceil(shared.page_tokens()));
        let mut fresh = fresh.into_iter();
        for (held, change) in self.holdings.iter_mut().zip(changes) {
            let given = fresh.by_ref().take(change.need(held)).collect();
            let until = rows.end.div_ceil(shared.page_tokens());
            held.apply(shared, state, (change, given), &appended);
            held.placed(until);
            if held.window.is_some() {
                held.let_donors_go(state, rows.start);
                let keep = held.spare_wanted(self.in_chunks, reserve);
                held.trim(state, keep);
            }
            if ends && held.window.is_some() {
                let private = held.private.blocks().iter();
                private.for_each(|&block| state.index.withhold(block, false));
            }
        }
        Ok(())
    }
}

impl Holding {
    /// What changes when `rows` come next, of a request of `len` tokens.
    fn change(&self, state: &State, rows: &Range<usize>, read_only: usize, len: usize) -> Change {
        let passed = self.passing(rows.start);
        let (mut again, mut private, mut prefix) = (Vec::new(), Vec::new(), Vec::new());
        for &b in &passed {
            let Some(block) = self.table.block(b) else { continue };
            let alone = state.pool.references(block) == 1 && !state.pool.is_indexed(block);
            match (b < read_only, alone) {
                (true, _) => prefix.push(block),
                (false, true) => again.push(block),
                (false, false) => private.push(block),
            }
        }
        let lacking = self.lacking(rows, read_only, len);
        Change { passed, again, private, prefix, lacking, forked: Vec::new() }
    }

    /// Grid blocks that a fork may write too, of positions that are appended: reserved ones also.
    fn forked(&self, state: &State, appended: &Range<usize>) -> Vec<usize> {
        if appended.is_empty() {
            return Vec::new();
        }
        let page = self.table.span(0).len();
        let written = appended.start / page..appended.end.div_ceil(page);
        written.filter(|&b| self.is_forked(state, b)).collect()
    }

    /// Grid blocks that are kept and that rows from `row` on do not see.
    fn passing(&self, row: usize) -> Vec<usize> {
        let Some(window) = self.window else { return Vec::new() };
        let end = self.table.len().min(window.first(row) / self.table.span(0).len());
        let kept = (self.passed..end).filter(|&b| self.table.block(b).is_some());
        kept.filter(|&b| !window.sees(row, &self.table.span(b))).collect()
    }

    /// Carries a change out with the blocks that the pool has given; `appended` positions are new.
    fn apply(
        &mut self,
        shared: &Shared,
        state: &mut State,
        (change, given): (Change, Vec<BlockId>),
        appended: &Range<usize>,
    ) {
        for &b in &change.passed {
            let page = self.table.page(b);
            self.table.take(b);
            self.copies.retain(|copy| copy[2] != page);
        }
        self.passed = self.passed.max(change.passed.last().map_or(0, |b| b + 1));
        self.lost |= !change.passed.is_empty();
        let mut gone = change.private;
        gone.iter().for_each(|&block| state.index.withhold(block, false));
        gone.extend(&change.again);
        if !gone.is_empty() {
            self.private.part_with(&gone);
        }
        if !change.prefix.is_empty() {
            self.prefix.part_with(&change.prefix);
        }
        let mut supply = change.again;
        supply.extend(self.spare.take_last(usize::MAX));
        supply.extend(given);
        self.table.grow(appended.end.div_ceil(self.table.span(0).len()));
        let mut replaced = Vec::new();
        for b in change.forked {
            let Some(block) = supply.pop() else { break };
            replaced.extend(self.move_block(b, block, state.pool.page(block), appended.start));
        }
        for b in change.lacking {
            let Some(block) = supply.pop() else { break };
            self.place(b, block, state.pool.page(block));
            self.private.extend(&[block]);
        }
        self.spare.extend(&supply);
        self.retire(shared, state, &replaced);
    }

    /// Stops reading donors that no row from `row` on sees, and lets go of them.
    fn let_donors_go(&mut self, state: &mut State, row: usize) {
        let Some(window) = self.window else { return };
        let sees = |piece: &Window| window.sees(row, &(piece.start..piece.end));
        if self.table.retain_windows(sees) {
            self.lost = true;
            let gone = self.drop_donors();
            state.pool.release(&gone);
        }
    }

    /// Blocks that must be at hand beside those in the table: what the next chunks may take, or
    /// else what was reserved, of which `reserve` blocks are still to come.
    fn spare_wanted(&self, in_chunks: bool, reserve: usize) -> usize {
        let Some(window) = self.window else { return 0 };
        if in_chunks {
            return self.quota.saturating_sub(self.private.blocks().len());
        }
        reserve.min(window.blocks(self.table.span(0).len(), 1))
    }

    fn trim(&mut self, state: &mut State, keep: usize) {
        let excess = self.spare.blocks().len().saturating_sub(keep);
        let gone = self.spare.take_last(excess);
        state.pool.disown(&gone);
        state.pool.release(&gone);
    }
}
