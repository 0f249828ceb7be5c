//! Moving on: window groups let go of what no coming row sees, and take blocks for those that come.

use std::ops::Range;

use crate::error::Error;
use crate::ids::BlockId;
use crate::tier::Place;

use super::books::{Shared, State};
use super::freeze;
use super::holding::Holding;
use super::request::Request;

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
    /// Blocks that the pool must give for `keep` to be left over.
    fn need(&self, held: &Holding, keep: usize) -> usize {
        let wanted = self.lacking.len() + self.forked.len() + keep;
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
        let ends = self.in_chunks && rows.start >= self.plan.tokens;
        let in_chunks = self.in_chunks && !ends;
        let page = shared.page_tokens();
        let reserve = self.reserved.div_ceil(page).saturating_sub(len.div_ceil(page));
        let both = || self.holdings.iter().zip(&changes);
        let keeps: Vec<usize> =
            both().map(|(held, change)| held.spare_wanted(change, in_chunks, reserve)).collect();
        let with = both().zip(&keeps).map(|((held, change), &keep)| change.need(held, keep));
        let without = both().map(|(held, change)| change.need(held, 0));
        let (fresh, needs) =
            self.exchange(shared, state, &changes, [with.collect(), without.collect()])?;
        self.front = rows.start;
        self.in_chunks = in_chunks;
        let mut fresh = fresh.into_iter();
        for (at, change) in changes.into_iter().enumerate() {
            let given = fresh.by_ref().take(needs[at]).collect();
            let held = &mut self.holdings[at];
            held.apply(shared, state, (change, given), &appended);
            held.placed(rows.end.div_ceil(page));
            if held.window.is_some() {
                held.let_donors_go(state, rows.start);
                held.trim(state, keeps[at]);
            }
            if ends && held.window.is_some() {
                let private = held.private.blocks().iter();
                private.for_each(|&block| state.index.withhold(block, false));
            }
        }
        Ok(())
    }

    /// Gives up what the changes say and takes blocks from the pool: as many for each table as the
    /// first of `needs` has, or else the second. What is given up counts, so that it suffices.
    fn exchange(
        &self,
        shared: &Shared,
        state: &mut State,
        changes: &[Change],
        needs: [Vec<usize>; 2],
    ) -> Result<(Vec<BlockId>, Vec<usize>), Error> {
        for change in changes {
            state.pool.disown(&change.private);
            state.pool.release(&change.private);
            state.pool.release(&change.prefix);
        }
        let [wanted, least] = needs;
        let fresh = match self.allocate(shared, state, &wanted) {
            Ok(fresh) => return Ok((fresh, wanted)),
            Err(_) => self.allocate(shared, state, &least),
        };
        if fresh.is_err() {
            for change in changes {
                state.pool.hold_as_owner(&change.private);
                state.pool.hold(&change.prefix);
            }
        }
        Ok((fresh?, least))
    }

    /// Blocks of each table's group, `needs` one a table; table by table.
    fn allocate(
        &self,
        shared: &Shared,
        state: &mut State,
        needs: &[usize],
    ) -> Result<Vec<BlockId>, Error> {
        let mut groups = vec![0; state.pool.group_count()];
        for (held, need) in self.holdings.iter().zip(needs) {
            groups[held.group.index()] += need;
        }
        let mut fresh = Vec::new();
        freeze::allocate(shared, state, &groups, &mut fresh)?;
        Ok(fresh)
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
            self.copies.give_up_into(Place::Device(page));
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

    /// Stops reading donors in grid blocks of which no row from `row` on sees anything, and lets go
    /// of them.
    fn let_donors_go(&mut self, state: &mut State, row: usize) {
        let Some(window) = self.window else { return };
        let page = self.table.span(0).len();
        let unseen = window.sink.next_multiple_of(page)..window.first(row) / page * page;
        if unseen.is_empty() || self.table.donors_in(unseen.clone()).next().is_none() {
            return;
        }
        self.lost = true;
        self.table.uncover(&unseen);
        let gone = self.drop_donors();
        state.pool.release(&gone);
    }

    /// Blocks that must be at hand after a change beside those in the table: what later chunks may
    /// take, or else what was reserved, of which `reserve` blocks are still to come.
    fn spare_wanted(&self, change: &Change, in_chunks: bool, reserve: usize) -> usize {
        let Some(window) = self.window else { return 0 };
        if in_chunks {
            let left = self.private.blocks().len() - change.again.len() - change.private.len();
            return self.quota.saturating_sub(left + change.lacking.len());
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
