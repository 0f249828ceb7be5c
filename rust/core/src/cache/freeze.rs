//! Pinning for knowledge bases, shrinking under pressure, growing back (SparseX §4.1).

use std::cmp::Reverse;
use std::ops::Range;

use crate::error::Error;
use crate::ids::BlockId;
use crate::pool::Stored;
use crate::segment::{ContentEntry, FrozenBlock, Index};

use super::commit::settle;
use super::{Request, Shared};

/// Growth stops this far below the watermark, so that shrinking and growing do not alternate.
const HYSTERESIS: u64 = 10;

type State = Stored<Index>;

/// Releases one pin of each node.
pub(super) fn release_pins(state: &mut State, anchors: &[BlockId]) {
    for &anchor in anchors {
        state.pool.release(state.index.row(anchor));
    }
}

fn rows_total(shared: &Shared, state: &State) -> u64 {
    state.pool.slab_pages_total() / shared.row_pages()
}

/// Gives up the least referenced frozen blocks that nobody reads, as many as it takes to stay
/// below the watermark with `needs` more blocks of each group; none where all of them would not
/// make the room.
pub(super) fn relieve(shared: &Shared, state: &mut State, needs: &[usize]) {
    if state.index.frozen.resident() == 0 {
        return;
    }
    let limit = state.pool.slab_pages_total() * u64::from(shared.config.watermark) / 100;
    let needed = state.pool.pages_of(needs);
    let used = state.pool.held_pages() + needed;
    let excess = used.saturating_sub(limit).div_ceil(shared.row_pages()) as usize;
    if excess == 0 {
        return;
    }
    let index = &state.index;
    let mut idle: Vec<(u32, Reverse<usize>, BlockId)> = Vec::new();
    for (place, block) in index.frozen.pinned_blocks().into_iter().enumerate() {
        if state.pool.references(block) == index.frozen.pins(block) {
            idle.push((index.uses(block), Reverse(place), block));
        }
    }
    let least = state.pool.held_pages() - idle.len() as u64 * shared.row_pages();
    if least + needed > state.pool.slab_pages_total() {
        return;
    }
    idle.sort_unstable();
    let given: Vec<BlockId> = idle.into_iter().take(excess).map(|(_, _, block)| block).collect();
    let released = state.index.frozen.give_up(&given);
    release_pins(state, &released);
}

/// Pins blocks again that were given up and are cached, while utilisation is low.
pub(super) fn regrow(shared: &Shared, state: &mut State) {
    if state.index.frozen.absent() == 0 {
        return;
    }
    let low = u64::from(shared.config.watermark).saturating_sub(HYSTERESIS);
    let limit = state.pool.slab_pages_total() * low / 100;
    for absent in state.index.frozen.absences() {
        let room = state.pool.held_pages() + shared.row_pages() <= limit;
        if !room || state.index.frozen.resident() as u64 >= share(shared, state) {
            return;
        }
        let found = state.index.find_content(absent.key, &absent.content);
        if let Some(block) = found.filter(|&block| state.index.is_whole(block)) {
            state.pool.hold(state.index.row(block));
            state.index.frozen.come_back(&absent, block);
        }
    }
}

fn share(shared: &Shared, state: &State) -> u64 {
    rows_total(shared, state) * u64::from(shared.config.frozen_share) / 100
}

/// Every pinned node must be in the index and held.
pub(super) fn check(state: &State) -> Result<(), Error> {
    for block in state.index.frozen.pinned_blocks() {
        let (pins, holders) = (state.index.frozen.pins(block), state.pool.references(block));
        if !state.index.is_member(block) {
            return Err(Error::inconsistent("frozen block", "an indexed block", block.index()));
        }
        if holders < pins {
            return Err(Error::inconsistent("frozen block holders", pins, holders));
        }
    }
    Ok(())
}

impl Request {
    /// Pins the committed blocks of `range`, in every head group, as a knowledge-base entry of this
    /// request's namespace. An entry of the same name is replaced.
    ///
    /// # Errors
    /// `OutOfRange` if the range is empty or not committed, `InvalidArgument` if part of it lies
    /// in another request's blocks, a window group has let go of it or the prompt is still
    /// computed in chunks, `PoolFull` if the frozen share does not suffice.
    pub fn freeze(&mut self, name: &str, range: Range<usize>) -> Result<(), Error> {
        if range.is_empty() || range.end > self.committed {
            let expected = format!("a non-empty range inside [0, {})", self.committed);
            let got = format!("[{}, {})", range.start, range.end);
            return Err(Error::out_of_range("freeze", expected, got));
        }
        self.chunks_done("freeze")?;
        let shared = self.shared.clone();
        let mut stored = shared.store.lock();
        let state = &mut *stored;
        let page = shared.page_tokens();
        let mut blocks = Vec::new();
        for b in range.start / page..range.end.div_ceil(page) {
            blocks.push(self.frozen_block(state, b)?);
        }
        let fresh = |block: &&FrozenBlock| {
            block.pinned.is_some_and(|block| !state.index.frozen.is_pinned(block))
        };
        let needed = blocks.iter().filter(fresh).count();
        let free = share(&shared, state) as usize;
        let free = free.saturating_sub(state.index.frozen.resident());
        if needed > free {
            return Err(Error::pool_full("frozen share of the pool", needed, free));
        }
        for block in blocks.iter().filter_map(|block| block.pinned) {
            state.pool.hold(state.index.row(block));
        }
        let old = state.index.frozen.insert(&self.namespace, name, range.len(), blocks);
        release_pins(state, &old);
        Ok(())
    }

    /// The node that stands for grid block `b`.
    fn frozen_block(&self, state: &mut State, b: usize) -> Result<FrozenBlock, Error> {
        let page = self.shared.page_tokens();
        let span = b * page..self.committed.min((b + 1) * page);
        let key = self.content_key(&span);
        let content = &self.tokens[span.clone()];
        let mut found = state.index.find_content(key, content);
        if !found.is_some_and(|block| state.index.is_whole(block)) {
            let mut row = Vec::new();
            if self.own_row(b, &mut row) {
                let position = span.start as u32;
                let exact = span.end <= self.exact;
                let entry = ContentEntry { key, tokens: content, position, exact, before: None };
                let mut forgotten = Vec::new();
                found = Some(state.index.register_content(&row, &entry, &mut forgotten));
                forgotten.into_iter().for_each(|block| state.pool.unindex(block));
                settle(state, &row);
            }
        }
        let whole = found.filter(|&block| state.index.is_whole(block));
        let pinned = whole.ok_or_else(|| {
            let got = format!("others' blocks, or lost ones, at [{}, {})", span.start, span.end);
            Error::invalid("freeze", "blocks of this request in every head group", got)
        })?;
        Ok(FrozenBlock { key, content: content.into(), pinned: Some(pinned) })
    }
}
