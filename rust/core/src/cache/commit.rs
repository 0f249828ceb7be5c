//! Commit: the indexes learn what a request has computed.
//!
//! Whole blocks inside [0, exact) enter the prefix tree; every block that this request stores
//! enters the virtual index with its provenance; the incomplete last block enters both by the
//! tokens it has. Approximate KV never enters the prefix tree. Where a window group has let go of
//! its block, the entry stands without it.

use std::ops::Range;

use crate::content::{ContentEntry, ContentId, Parent};
use crate::error::Error;
use crate::ids::BlockId;

use super::books::{State, release_pins, settle};
use super::freeze;
use super::request::{Chain, Request};

impl Request {
    /// Says that K and V of [0, computed) are stored, and that those of [0, exact) are what a
    /// full prefill would have stored.
    ///
    /// # Errors
    /// `OutOfRange` unless committed <= computed <= len and exact <= computed, `InvalidArgument`
    /// if copies have not been taken, for a request that was brought in from elsewhere, or one of
    /// which some KV was spilled.
    pub fn commit(&mut self, computed: usize, exact: usize) -> Result<(), Error> {
        if computed > self.len() || exact > computed {
            let expected = format!("exact <= computed <= {}", self.len());
            let got = format!("computed {computed}, exact {exact}");
            return Err(Error::out_of_range("commit", expected, got));
        }
        self.copies_taken("commit")?;
        self.resident("commit")?;
        if self.brought_in {
            let expected = "a request that was prefilled here";
            return Err(Error::invalid("commit", expected, "one brought in to decode from"));
        }
        if computed <= self.committed {
            return Ok(());
        }
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let page = common.page_tokens();
        let tokens = std::mem::take(&mut self.tokens);
        let mut row = Vec::with_capacity(common.groups.len());
        for b in self.committed / page..computed.div_ceil(page) {
            let span = b * page..computed.min((b + 1) * page);
            let own = self.own_row(b, &mut row);
            if !own || !self.learn(state, &tokens, (b, &row), span, exact) {
                self.before = None;
            }
        }
        self.tokens = tokens;
        self.committed = computed;
        self.exact = exact;
        freeze::regrow(&common, state);
        Ok(())
    }

    /// The blocks that stand for grid block `b`, one a head group: none where a window group keeps
    /// nothing, or lacks a head. False if it is not stored in a block of this request.
    pub(super) fn own_row(&self, b: usize, row: &mut Vec<BlockId>) -> bool {
        row.clear();
        let groups = &self.holdings[..self.common.groups.len()];
        row.extend(groups.iter().map(|held| match held.table.own(b) {
            Some(block) if !held.promoted_from => block,
            _ => BlockId::NONE,
        }));
        b >= self.read_only && row[0].is_some()
    }

    /// Enters one block; false if others have entered what follows it.
    fn learn(
        &mut self,
        state: &mut State,
        tokens: &[u32],
        (b, row): (usize, &[BlockId]),
        span: Range<usize>,
        exact: usize,
    ) -> bool {
        let content = &tokens[span.clone()];
        let known = state.index.known_tokens(row[0]);
        if known > content.len() {
            // A fork has committed more of the same block.
            return true;
        }
        if known > 0 && known < content.len() {
            self.regrow(state, row);
        }
        let head = exact.saturating_sub(span.start).min(span.len());
        let whole = head == self.common.page_tokens();
        let chained = b == self.chain.blocks && head > 0 && self.revive_chain(state, tokens);
        let exact_text = match (chained, whole) {
            (true, true) => {
                if row.len() > 1 {
                    let digest = state.index.hash(self.chain.digest, content);
                    state.index.fill(row, self.scope, self.chain.parent, digest, content);
                }
                self.chain_block(state, tokens, b, row)
            }
            (true, false) => {
                let (scope, parent) = (self.scope, self.chain.parent);
                state.index.register_tail(row, scope, parent, content, head, span.start as u32)
            }
            (false, _) => None,
        };
        let entry = ContentEntry {
            scope: self.content_scope(&span),
            tokens: content,
            position: span.start as u32,
            exact: span.end <= exact,
            before: self.before,
        };
        let mut forgotten = Vec::new();
        let stands = state.index.register_content(row, &entry, exact_text, &mut forgotten);
        for block in forgotten {
            state.pool.unindex(block);
        }
        settle(state, row);
        self.withhold(state, row);
        state.index.announce(stands);
        if span.len() == self.common.page_tokens() {
            self.before = Some(state.index.link(stands));
        }
        true
    }

    /// Takes a block whose content has grown out of the indexes. Blocks of window groups that this
    /// request has let go of did not grow with it.
    fn regrow(&self, state: &mut State, row: &[BlockId]) {
        let Some(content) = state.index.content_of(row[0]) else { return };
        state.index.withdraw(content);
        if state.index.row(content) == row {
            return;
        }
        release_pins(state, content);
        let mut gone = Vec::new();
        state.index.detach_others(row, &mut gone);
        gone.into_iter().for_each(|block| state.pool.unindex(block));
    }

    /// Keeps the blocks of window groups from others while the prompt is in chunks.
    fn withhold(&self, state: &mut State, row: &[BlockId]) {
        if self.in_chunks {
            for (held, &block) in self.holdings.iter().zip(row) {
                if held.window.is_some() && block.is_some() {
                    state.index.withhold(block, true);
                }
            }
        }
    }

    /// Enters a whole exact block below the chain and moves the chain on, if it can be entered.
    /// Returns the node that stands for it there.
    fn chain_block(
        &mut self,
        state: &mut State,
        tokens: &[u32],
        b: usize,
        row: &[BlockId],
    ) -> Option<ContentId> {
        let page = self.common.page_tokens();
        let span = b * page..(b + 1) * page;
        let tokens = &tokens[span.clone()];
        let digest = state.index.hash(self.chain.digest, tokens);
        let (scope, parent, at) = (self.scope, self.chain.parent, span.start as u32);
        if self.common.config.eviction.recalls() && state.index.has_departed(digest) {
            self.recall(state, b);
        }
        let node = state.index.register_prefix(row, scope, parent, digest, tokens, at);
        if let Some(node) = node {
            let link = Some(state.index.link(node));
            self.chain = Chain::new(Parent::Content(node), link, digest, b + 1);
        }
        node
    }

    /// Says that block `b` was cached before, and so were those before it, whether that is still
    /// known of them or not: none of them goes before what follows it.
    fn recall(&mut self, state: &mut State, b: usize) {
        let mut row = Vec::with_capacity(self.common.groups.len());
        for b in self.recalled..=b {
            if self.own_row(b, &mut row) {
                state.pool.recall(&row);
            }
        }
        self.recalled = b + 1;
    }

    /// Makes sure that the chain's last block is still in the prefix tree. It may be another
    /// request's block of the same prefix, which this request does not hold: if it was evicted,
    /// this request's own blocks take its place.
    fn revive_chain(&mut self, state: &mut State, tokens: &[u32]) -> bool {
        let stands = match self.chain.link {
            None => true,
            Some(link) => state.index.follow(link).is_some_and(|b| state.index.in_prefix(b)),
        };
        if stands {
            return true;
        }
        let blocks = self.chain.blocks;
        self.chain = Chain::new(Parent::Root, None, state.index.root(self.scope), 0);
        let mut row = Vec::with_capacity(self.common.groups.len());
        for b in 0..blocks {
            self.own_row(b, &mut row);
            let Some(anchor) = self.holdings[0].table.block(b) else { return false };
            row[0] = anchor;
            if self.chain_block(state, tokens, b, &row).is_none() {
                return false;
            }
            settle(state, &row);
        }
        true
    }
}
