//! Moving on: window groups let go of what no coming row sees, and take blocks for those that come.

use std::ops::Range;
use std::slice;

use hashbrown::HashMap;

use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::books::{Common, State};
use super::freeze;
use super::holding::Holding;
use super::request::Request;

/// What is to change in one table.
struct Change {
    group: GroupId,
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
    /// Blocks to be at hand afterwards beside those in the table.
    keep: usize,
    /// Blocks that the pool must give for these to be left over, and those that it must give at
    /// least.
    needs: [usize; 2],
}

/// Owners and holders that blocks lose through earlier requests of the same step: each request
/// moves on as if those before it had.
#[derive(Default)]
pub(super) struct Left {
    owners: HashMap<BlockId, u32>,
    holders: HashMap<BlockId, u32>,
}

impl Left {
    fn owners(&self, state: &State, block: BlockId) -> u32 {
        state.pool.owners(block) - self.owners.get(&block).copied().unwrap_or(0)
    }

    fn holders(&self, state: &State, block: BlockId) -> u32 {
        state.pool.references(block) - self.holders.get(&block).copied().unwrap_or(0)
    }
}

/// How one request moves on to some rows, decided before anything has changed.
pub(super) struct Slide {
    rows: Range<usize>,
    appended: Range<usize>,
    /// Whether the prompt is still being computed in chunks, and whether that ends now.
    in_chunks: bool,
    ends: bool,
    changes: Vec<Change>,
}

/// Blocks that the pool has given for some slides, by group.
pub(super) struct Given {
    blocks: Vec<std::vec::IntoIter<BlockId>>,
    /// Which of a change's `needs` they meet.
    which: usize,
}

impl Slide {
    fn add_needs(&self, which: usize, needs: &mut [usize]) {
        for change in &self.changes {
            needs[change.group.index()] += change.needs[which];
        }
    }
}

/// Takes from the pool what all slides need: as many blocks as they want, or else as many as they
/// must have. What they give up counts, so that it suffices.
///
/// # Errors
/// `PoolFull` with the number of the first slide whose blocks, with those of the slides before it,
/// are not to be had. Nothing has changed then.
pub(super) fn exchange(
    common: &Common,
    state: &mut State,
    slides: &[&Slide],
) -> Result<Given, (usize, Error)> {
    let changes = || slides.iter().flat_map(|slide| &slide.changes);
    for change in changes() {
        state.pool.disown(&change.private);
        state.pool.release(&change.private);
        state.pool.release(&change.prefix);
    }
    let groups = state.pool.group_count();
    let needs_of = |which: usize, slides: &[&Slide]| {
        let mut needs = vec![0; groups];
        slides.iter().for_each(|slide| slide.add_needs(which, &mut needs));
        needs
    };
    let mut refused = None;
    for which in [0, 1] {
        let (needs, mut fresh) = (needs_of(which, slides), Vec::new());
        match freeze::allocate(common, state, &needs, &mut fresh) {
            Ok(()) => {
                let mut fresh = fresh.into_iter();
                let group = |need| fresh.by_ref().take(need).collect::<Vec<_>>().into_iter();
                return Ok(Given { blocks: needs.into_iter().map(group).collect(), which });
            }
            Err(error) => refused = Some(error),
        }
    }
    let (mut fit, mut short) = (0, slides.len());
    while fit + 1 < short {
        let middle = usize::midpoint(fit, short);
        let fits = freeze::fits(common, state, &needs_of(1, &slides[..middle]));
        *(if fits { &mut fit } else { &mut short }) = middle;
    }
    for change in changes() {
        state.pool.hold_as_owner(&change.private);
        state.pool.hold(&change.prefix);
    }
    let unknown = || Error::inconsistent("blocks", "a refusal", "none");
    Err((short.saturating_sub(1), refused.unwrap_or_else(unknown)))
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
        let common = self.common.clone();
        let mut stored = common.store.lock();
        self.slide(&common, &mut stored, start..end, self.len())
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
        let common = self.common.clone();
        let mut stored = common.store.lock();
        if self.rests_until(&stored, self.len()..len) {
            self.rest();
        } else {
            self.slide(&common, &mut stored, self.len()..len, len)?;
        }
        drop(stored);
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// All or nothing: rows before `rows` are done, `rows` come next, the length becomes `len`.
    fn slide(
        &mut self,
        common: &Common,
        state: &mut State,
        rows: Range<usize>,
        len: usize,
    ) -> Result<(), Error> {
        let slide = self.slide_to(state, rows, len, &mut Left::default());
        let mut given = exchange(common, state, &[&slide]).map_err(|(_, error)| error)?;
        self.carry_out(common, state, slide, &mut given);
        Ok(())
    }

    /// How this request moves on: rows before `rows` are done, `rows` come next, the length becomes
    /// `len`.
    pub(super) fn slide_to(
        &self,
        state: &State,
        rows: Range<usize>,
        len: usize,
        left: &mut Left,
    ) -> Slide {
        let appended = self.len()..len;
        let ends = self.in_chunks && rows.start >= self.plan.tokens;
        let in_chunks = self.in_chunks && !ends;
        let reserve = self.reserve_left(len);
        let mut change = |held: &Holding| {
            let mut change = held.change(state, &rows, (self.read_only, len), left);
            change.forked = held.forked(state, &appended, left);
            change.keep = held.spare_wanted(&change, in_chunks, reserve);
            change.needs = [change.keep, 0].map(|keep| held.need(&change, keep));
            change
        };
        let changes = self.holdings.iter().map(&mut change).collect();
        Slide { rows, appended, in_chunks, ends, changes }
    }

    /// Does what was decided, with the blocks that the pool has given.
    pub(super) fn carry_out(
        &mut self,
        common: &Common,
        state: &mut State,
        slide: Slide,
        given: &mut Given,
    ) {
        let Slide { rows, appended, in_chunks, ends, changes } = slide;
        self.front = rows.start;
        self.in_chunks = in_chunks;
        self.revision += 1;
        for (held, change) in self.holdings.iter_mut().zip(changes) {
            let keep = change.keep;
            let blocks = &mut given.blocks[held.group.index()];
            let fresh = blocks.take(change.needs[given.which]).collect();
            held.apply(common, state, (change, fresh), &appended);
            held.placed(rows.end.div_ceil(common.page_tokens()));
            if held.window.is_some() {
                held.let_donors_go(state, rows.start);
                held.trim(state, keep);
            }
            if ends && held.window.is_some() {
                let private = held.private.blocks().iter();
                private.for_each(|&block| state.index.withhold(block, false));
            }
        }
    }

    /// Whether more tokens, at these positions, ask for nothing: their block is there, nobody else
    /// owns it, and no window moves past a block. [`Self::slide_to`] would find the same, at the
    /// price of a longer look.
    pub(super) fn rests_until(&self, state: &State, rows: Range<usize>) -> bool {
        let (page, at) = (self.common.page_tokens(), rows.start);
        if self.in_chunks || at.is_multiple_of(page) || (rows.end - 1) / page != at / page {
            return false;
        }
        // All that the row before saw is there, if that was the one asked for last.
        let follows = self.front + 1 == at;
        let reserve = self.reserve_left(rows.end);
        self.holdings.iter().all(|held| {
            let own = held.table.block(at / page).is_some_and(|b| state.pool.owners(b) == 1);
            own && held.pieces.is_empty()
                && held.window.is_none_or(|window| {
                    follows
                        && held.table.donors().is_empty()
                        && held.spare.blocks().len() == reserve.min(window.blocks(page, 1))
                        && held.passing(at).is_empty()
                })
        })
    }

    /// Moves on by rows that ask for nothing.
    pub(super) fn rest(&mut self) {
        self.front = self.len();
        self.revision += 1;
    }

    /// Blocks that were promised and are still to come when there are `len` tokens.
    pub(super) fn reserve_left(&self, len: usize) -> usize {
        let page = self.common.page_tokens();
        self.reserved.div_ceil(page).saturating_sub(len.div_ceil(page))
    }
}

impl Holding {
    /// What changes when `rows` come next, of a request of `len` tokens.
    fn change(
        &self,
        state: &State,
        rows: &Range<usize>,
        (read_only, len): (usize, usize),
        left: &mut Left,
    ) -> Change {
        let passed = self.passing(rows.start);
        let (mut again, mut private, mut prefix) = (Vec::new(), Vec::new(), Vec::new());
        for &b in &passed {
            let Some(block) = self.table.block(b) else { continue };
            let alone = left.holders(state, block) == 1 && !state.pool.is_indexed(block);
            match (b < read_only, alone) {
                (true, _) => prefix.push(block),
                (false, true) => again.push(block),
                (false, false) => {
                    private.push(block);
                    *left.owners.entry(block).or_default() += 1;
                }
            }
            if b < read_only || !alone {
                *left.holders.entry(block).or_default() += 1;
            }
        }
        let lacking = self.lacking(rows, read_only, len);
        let (group, forked) = (self.group, Vec::new());
        let (keep, needs) = (0, [0; 2]);
        Change { group, passed, again, private, prefix, lacking, forked, keep, needs }
    }

    /// Blocks that the pool must give for `keep` to be left over.
    fn need(&self, change: &Change, keep: usize) -> usize {
        let wanted = change.lacking.len() + change.forked.len() + keep;
        wanted.saturating_sub(change.again.len() + self.spare.blocks().len())
    }

    /// Grid blocks that a fork may write too, of positions that are appended: reserved ones also.
    fn forked(&self, state: &State, appended: &Range<usize>, left: &mut Left) -> Vec<usize> {
        if appended.is_empty() {
            return Vec::new();
        }
        let page = self.table.span(0).len();
        let written = appended.start / page..appended.end.div_ceil(page);
        let mut forked = Vec::new();
        for b in written {
            let Some(block) = self.table.block(b) else { continue };
            if left.owners(state, block) > 1 {
                forked.push(b);
                *left.owners.entry(block).or_default() += 1;
            }
        }
        forked
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
        common: &Common,
        state: &mut State,
        (change, given): (Change, Vec<BlockId>),
        appended: &Range<usize>,
    ) {
        for &b in &change.passed {
            let page = self.table.page(b);
            self.table.take(b);
            self.copies.give_up_into(page);
        }
        self.passed = self.passed.max(change.passed.last().map_or(0, |b| b + 1));
        self.lost |= !change.passed.is_empty();
        let mut gone = change.private;
        gone.extend(&change.again);
        gone.iter().for_each(|&block| state.index.withhold(block, false));
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
        self.retire(common, state, &replaced);
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
        self.table.uncover(slice::from_ref(&unseen));
        let gone = self.drop_donors();
        state.pool.release(&gone);
    }

    /// Blocks that must be at hand after a change beside those in the table: what later chunks may
    /// take, or else what was reserved, of which `reserve` blocks are still to come.
    fn spare_wanted(&self, change: &Change, in_chunks: bool, reserve: usize) -> usize {
        let Some(window) = self.window else { return 0 };
        if in_chunks {
            let left = self.private.blocks().len() - change.again.len() - change.private.len();
            return self.chunk_blocks.saturating_sub(left + change.lacking.len());
        }
        reserve.min(window.blocks(self.table.span(0).len(), 1))
    }

    pub(super) fn trim(&mut self, state: &mut State, keep: usize) {
        let excess = self.spare.blocks().len().saturating_sub(keep);
        let gone = self.spare.take_last(excess);
        state.pool.disown(&gone);
        state.pool.release(&gone);
    }
}
