//! Commit: the indexes learn what a request has computed.
//!
//! Whole blocks inside [0, exact) enter the prefix tree; every block that this request stores
//! enters the virtual index with its provenance; the incomplete last block enters both by the
//! tokens it has. Approximate KV never enters the prefix tree.

use std::ops::Range;

use crate::error::Error;
use crate::ids::BlockId;
use crate::plan::BlockTable;
use crate::pool::Stored;
use crate::segment::{ContentEntry, Index, Parent};

use super::freeze;
use super::request::{Chain, Request};

type State = Stored<Index>;

impl Request {
    /// Says that K and V of [0, computed) are stored, and that those of [0, exact) are what a
    /// full prefill would have stored.
    ///
    /// # Errors
    /// `OutOfRange` unless committed <= computed <= len and exact <= computed, `InvalidArgument`
    /// if copies have not been taken.
    pub fn commit(&mut self, computed: usize, exact: usize) -> Result<(), Error> {
        if computed > self.len() || exact > computed {
            let expected = format!("exact <= computed <= {}", self.len());
            let got = format!("computed {computed}, exact {exact}");
            return Err(Error::out_of_range("commit", expected, got));
        }
        self.copies_taken("commit")?;
        if computed <= self.committed {
            return Ok(());
        }
        let shared = self.shared.clone();
        let mut stored = shared.store.lock();
        let state = &mut *stored;
        let page = shared.page_tokens();
        // Lent to the loop, which changes the rest of the request.
        let lent = Lent {
            table: std::mem::take(&mut self.table),
            tokens: std::mem::take(&mut self.tokens),
            page,
        };
        for b in self.committed / page..computed.div_ceil(page) {
            let span = b * page..computed.min((b + 1) * page);
            if b < self.read_only || !self.learn(state, &lent, b, span, exact) {
                self.before = None;
            }
        }
        (self.table, self.tokens) = (lent.table, lent.tokens);
        self.committed = computed;
        self.exact = exact;
        freeze::regrow(&shared, state);
        Ok(())
    }

    /// Enters one block; false if it is not stored in a block of this request.
    fn learn(
        &mut self,
        state: &mut State,
        lent: &Lent,
        b: usize,
        span: Range<usize>,
        exact: usize,
    ) -> bool {
        let Some(row) = lent.table.own(b) else { return false };
        let tokens = &lent.tokens[span.clone()];
        let known = state.index.known_tokens(row[0]);
        if known > tokens.len() {
            // A fork has committed more of the same block.
            return true;
        }
        if known > 0 && known < tokens.len() {
            state.index.withdraw(row[0]);
        }
        let entry = ContentEntry {
            key: self.content_key(&span),
            tokens,
            position: span.start as u32,
            exact: span.end <= exact,
            before: self.before,
        };
        let mut forgotten = Vec::new();
        let stands = state.index.register_content(row, &entry, &mut forgotten);
        for block in forgotten {
            state.pool.unindex(block);
        }
        let head = exact.saturating_sub(span.start).min(span.len());
        if b == self.chain.blocks && head > 0 && self.revive_chain(state, lent) {
            if head == lent.page {
                self.chain_block(state, lent, b, row);
            } else {
                let (key, parent) = (self.key, self.chain.parent);
                state.index.register_tail(row, key, parent, tokens, head, span.start as u32);
            }
        }
        settle(state, row);
        if span.len() == lent.page {
            self.before = Some(state.index.link(stands));
        }
        true
    }

    /// Enters a whole exact block below the chain and moves the chain on, if it can be entered.
    fn chain_block(&mut self, state: &mut State, lent: &Lent, b: usize, row: &[BlockId]) -> bool {
        let span = b * lent.page..(b + 1) * lent.page;
        let tokens = &lent.tokens[span.clone()];
        let digest = state.index.hash(self.chain.digest, tokens);
        let (key, parent, at) = (self.key, self.chain.parent, span.start as u32);
        let node = state.index.register_prefix(row, key, parent, digest, tokens, at);
        if let Some(node) = node {
            let link = Some(state.index.link(node));
            self.chain = Chain::new(Parent::Block(node), link, digest, b + 1);
        }
        node.is_some()
    }

    /// Makes sure that the chain's last block is still in the prefix tree. It may be another
    /// request's block of the same prefix, which this request does not hold: if it was evicted,
    /// this request's own blocks take its place.
    fn revive_chain(&mut self, state: &mut State, lent: &Lent) -> bool {
        let stands = match self.chain.link {
            None => true,
            Some(link) => state.index.follow(link).is_some_and(|b| state.index.in_prefix(b)),
        };
        if stands {
            return true;
        }
        let blocks = self.chain.blocks;
        self.chain = Chain::new(Parent::Root, None, state.index.root(self.key), 0);
        for b in 0..blocks {
            let Some(row) = lent.table.row(b) else { return false };
            if !self.chain_block(state, lent, b, row) {
                return false;
            }
            settle(state, row);
        }
        true
    }
}

/// The parts of a request that its commit only reads.
struct Lent {
    table: BlockTable,
    tokens: Vec<u32>,
    page: usize,
}

/// Tells the pool whether the index names these blocks.
fn settle(state: &mut State, row: &[BlockId]) {
    if state.index.is_member(row[0]) {
        state.pool.mark_indexed(row);
    } else {
        // A frozen tail that grew into content another block stands for: that one may be pinned.
        if state.index.frozen.is_pinned(row[0]) {
            let released = state.index.frozen.give_up(&row[..1]);
            freeze::release_pins(state, &released);
        }
        for &block in row {
            state.pool.unindex(block);
        }
        state.index.release_void(row[0]);
    }
}
