//! Pinning for knowledge bases, shrinking under pressure, growing back (SparseX §4.1).

use std::collections::BTreeSet;
use std::ops::Range;

use crate::content::{ContentEntry, ContentId, DocumentBlock, Removed};
use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::books::{Common, State, note_quotas, release_pins, settle};
use super::request::Request;

/// Growth stops this far below the watermark, so that shrinking and growing do not alternate.
const HYSTERESIS: u64 = 10;

/// Releases the pins of an entry that was removed. What it alone owned is found no longer by its
/// content: its text may have been replaced, and the KV of a block says what stood before it.
pub(super) fn forget(state: &mut State, removed: Removed) {
    for &content in &removed.released {
        state.pool.unpin(state.index.row(content));
    }
    let absent = removed.absent.iter().filter_map(|text| state.index.find_text(text));
    let absent = absent.filter(|&content| !state.index.frozen.is_pinned(content));
    let mut contents: Vec<ContentId> = absent.collect();
    contents.extend(removed.unpinned);
    let mut forgotten = Vec::new();
    for content in contents {
        state.index.forget_content(content, &mut forgotten);
    }
    forgotten.into_iter().for_each(|block| state.pool.unindex(block));
    removed.scopes.into_iter().for_each(|scope| state.index.release_scope(scope));
    note_quotas(state);
}

/// Undoes [`regrow`].
pub(super) fn let_go(state: &mut State, grown: &[(ContentId, DocumentBlock)]) {
    for &(content, place) in grown {
        state.index.frozen.let_go(place, content);
        state.pool.unpin(state.index.row(content));
    }
    note_quotas(state);
}

fn pin(state: &mut State, content: ContentId, place: DocumentBlock) {
    state.pool.pin(state.index.row(content), state.index.uses(content), place);
}

fn rows_total(common: &Common, state: &State) -> u64 {
    state.pool.slab_pages_total() / common.row_pages()
}

/// Takes blocks from the pool, `needs` of each group, all or nothing. Frozen blocks yield as
/// [`shrink`] says, and are pinned again where that did not make the room.
pub(super) fn allocate(
    common: &Common,
    state: &mut State,
    needs: &[usize],
    out: &mut Vec<BlockId>,
) -> Result<(), Error> {
    let needed = state.pool.pages_of(needs);
    let given = if needed > 0 { shrink(common, state, needed) } else { Vec::new() };
    let outcome = state.pool.allocate(needs, &mut state.index, out);
    if outcome.is_err() {
        pin_again(state, given);
    }
    outcome
}

/// Whether [`allocate`] would find so many blocks now. Changes nothing.
pub(super) fn fits(common: &Common, state: &mut State, needs: &[usize]) -> bool {
    with_room(common, state, needs, |state| state.pool.fits(needs))
}

/// Looks at what would be frozen once [`allocate`] had taken so many blocks. Changes nothing.
pub(super) fn with_room<T>(
    common: &Common,
    state: &mut State,
    needs: &[usize],
    look: impl FnOnce(&mut State) -> T,
) -> T {
    let needed = state.pool.pages_of(needs);
    let given = if needed > 0 { shrink(common, state, needed) } else { Vec::new() };
    let seen = look(state);
    pin_again(state, given);
    seen
}

/// Refuses to freeze blocks under the first of the names in `going`, each behind its namespace:
/// those of `blocks` that are there, and `absent` others. The entries of these names go.
pub(super) fn check_room(
    common: &Common,
    state: &State,
    going: &[(&str, &str)],
    blocks: &[ContentId],
    absent: usize,
) -> Result<(), Error> {
    let frozen = &state.index.frozen;
    let held = frozen.resident() - frozen.alone(going, blocks);
    let new = blocks.iter().filter(|&&block| !frozen.is_pinned(block));
    let needed = new.collect::<BTreeSet<_>>().len() + absent;
    let free = (frozen_limit(common, state) as usize).saturating_sub(held);
    if needed > free {
        return Err(Error::pool_full("frozen share of the pool", needed, free));
    }
    let named = going[0];
    let Some(account) = state.index.account(named.0) else { return Ok(()) };
    let (free, needed) = frozen.quota_room(account, named, blocks.iter().copied());
    if needed + absent > free {
        return Err(Error::quota_exceeded(named.0, needed + absent, free));
    }
    Ok(())
}

/// Undoes [`shrink`].
fn pin_again(state: &mut State, given: Vec<(ContentId, DocumentBlock)>) {
    for (content, place) in given {
        pin(state, content, place);
        state.index.frozen.come_back(place, content);
    }
    note_quotas(state);
}

/// Gives up the least referenced frozen blocks that nobody reads, as many as it takes to stay
/// below the watermark with `needed` more pages; none where all of them would not make the room.
/// Returns which, and where they were.
pub(super) fn shrink(
    common: &Common,
    state: &mut State,
    needed: u64,
) -> Vec<(ContentId, DocumentBlock)> {
    let limit = state.pool.slab_pages_total() * u64::from(common.config.watermark) / 100;
    let used = state.pool.held_pages() + needed;
    let excess = used.saturating_sub(limit).div_ceil(common.row_pages()) as usize;
    if excess == 0 {
        return Vec::new();
    }
    let idle = state.pool.idle_count() as u64;
    let least = state.pool.held_pages() - idle * common.row_pages();
    if least + needed > state.pool.slab_pages_total() {
        return Vec::new();
    }
    let yielding = state.pool.idle_pins().take(excess);
    let yielding: Vec<ContentId> =
        yielding.filter_map(|block| state.index.content_of(block)).collect();
    let mut given = Vec::with_capacity(yielding.len());
    for content in yielding {
        given.extend(release_pins(state, content).into_iter().map(|place| (content, place)));
    }
    given
}

/// Pins blocks again that were given up and are cached, while utilisation is low. Returns which,
/// and where they are.
pub(super) fn regrow(common: &Common, state: &mut State) -> Vec<(ContentId, DocumentBlock)> {
    let mut grown = Vec::new();
    while let Some((place, text)) = state.index.frozen.next_waiting() {
        if !may_regrow(common, state) {
            break;
        }
        let found = state.index.find_text(text).filter(|&block| state.index.is_whole(block));
        match found {
            Some(block) if !state.index.frozen.may_come_back(place, block) => {
                state.index.frozen.park(place);
            }
            Some(block) => {
                pin(state, block, place);
                state.index.frozen.come_back(place, block);
                grown.push((block, place));
            }
            None => state.index.frozen.lose(place),
        }
    }
    note_quotas(state);
    grown
}

/// Whether utilisation is low enough for another block to be pinned again, and there are not too
/// many.
fn may_regrow(common: &Common, state: &State) -> bool {
    let low = u64::from(common.config.watermark).saturating_sub(HYSTERESIS);
    let limit = state.pool.slab_pages_total() * low / 100;
    let room = state.pool.held_pages() + common.row_pages() <= limit;
    room && (state.index.frozen.resident() as u64) < frozen_limit(common, state)
}

/// Distinct blocks that all knowledge bases together may pin.
fn frozen_limit(common: &Common, state: &State) -> u64 {
    rows_total(common, state) * u64::from(common.config.frozen_share) / 100
}

/// Every pinned node must be in the index and held.
pub(super) fn check(state: &State) -> Result<(), Error> {
    for content in state.index.frozen.pinned() {
        let block = state.index.row(content)[0];
        if !block.is_some() || !state.index.is_member(content) {
            return Err(Error::inconsistent("frozen content", "an indexed one", content.index()));
        }
        let (pins, holders) = (state.index.frozen.pins(content), state.pool.references(block));
        if holders < pins {
            return Err(Error::inconsistent("frozen block holders", pins, holders));
        }
    }
    check_quotas(state)
}

/// No namespace pins more than its quota, and the pool knows what is left of it.
fn check_quotas(state: &State) -> Result<(), Error> {
    for (namespace, account) in state.index.accounts() {
        let (blocks, frozen) = state.index.frozen.charge(account);
        let (allowed, _) = state.pool.allowance(account, GroupId(0));
        let pinned = state.index.frozen.charged(account).count();
        let what = format!("quota of namespace {namespace:?}");
        if frozen != pinned || frozen > blocks {
            return Err(Error::inconsistent(what, format!("{pinned} of {blocks}"), frozen));
        }
        if allowed != blocks - frozen {
            return Err(Error::inconsistent(what, blocks - frozen, allowed));
        }
    }
    Ok(())
}

impl Request {
    /// Pins the committed blocks of `range`, in every head group, as a knowledge-base entry of this
    /// request's namespace. An entry of the same name is replaced.
    ///
    /// # Errors
    /// `OutOfRange` if the range is empty or not committed, `InvalidArgument` if the name is empty,
    /// part of the range lies in another request's blocks, a window group has let go of it or the
    /// prompt is still computed in chunks, `PoolFull` if the frozen share does not suffice,
    /// `QuotaExceeded` if the namespace's quota does not.
    pub fn freeze(&mut self, name: &str, range: Range<usize>) -> Result<(), Error> {
        if range.is_empty() || range.end > self.committed {
            let expected = format!("a non-empty range inside [0, {})", self.committed);
            let got = format!("[{}, {})", range.start, range.end);
            return Err(Error::out_of_range("freeze", expected, got));
        }
        if name.is_empty() {
            return Err(Error::invalid("name", "at least one character", "none"));
        }
        self.chunks_done("freeze")?;
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let page = common.page_tokens();
        let chain = state.index.exact_chain(self.scope, &self.tokens[..self.exact]);
        let mut blocks = Vec::new();
        for b in range.start / page..range.end.div_ceil(page) {
            let block = self.frozen_block(state, b, chain.get(b).copied())?;
            blocks.push((state.index.text_of(block), block));
        }
        let pinned: Vec<ContentId> = blocks.iter().map(|&(_, block)| block).collect();
        let (named, account) =
            ((self.namespace.as_str(), name), state.index.account(&self.namespace));
        check_room(&common, state, &[named], &pinned, 0)?;
        let number = state.index.frozen.next_number();
        for (at, &(_, block)) in (0..).zip(&blocks) {
            pin(state, block, (number, at));
        }
        for (text, _) in &blocks {
            state.index.hold_scope(text.scope);
        }
        let replaced = state.index.frozen.insert(named, account, range.len(), blocks);
        forget(state, replaced);
        Ok(())
    }

    /// The node that stands for grid block `b`: that of its text in the prefix tree, where it is
    /// exact (`exact_text`), or else this request's own, or else one of equal content.
    fn frozen_block(
        &self,
        state: &mut State,
        b: usize,
        exact_text: Option<ContentId>,
    ) -> Result<ContentId, Error> {
        let page = self.common.page_tokens();
        let span = b * page..self.committed.min((b + 1) * page);
        let scope = self.content_scope(&span);
        let tokens = &self.tokens[span.clone()];
        let index = &state.index;
        let is_it = |node: &ContentId| index.is_whole(*node) && index.holds(*node, scope, tokens);
        let mut row = Vec::new();
        let own = self.own_row(b, &mut row);
        let node = exact_text.filter(is_it);
        let mine = row.first().filter(|block| block.is_some());
        let mine = mine.and_then(|&block| index.content_of(block)).filter(|&c| index.is_member(c));
        let found = node.or_else(|| mine.filter(is_it)).or_else(|| index.find_whole(scope, tokens));
        let entry = ContentEntry {
            scope,
            tokens,
            position: span.start as u32,
            exact: span.end <= self.exact,
            before: None,
        };
        let stands = match found {
            Some(found) => {
                state.index.ensure_content(found, &entry);
                Some(found)
            }
            None if own => {
                let mut forgotten = Vec::new();
                let stands = state.index.register_content(&row, &entry, None, &mut forgotten);
                forgotten.into_iter().for_each(|block| state.pool.unindex(block));
                settle(state, &row);
                Some(stands)
            }
            None => None,
        };
        stands.filter(|&block| state.index.is_whole(block)).ok_or_else(|| {
            let got = format!("others' blocks, or lost ones, at [{}, {})", span.start, span.end);
            Error::invalid("freeze", "blocks of this request in every head group", got)
        })
    }
}
