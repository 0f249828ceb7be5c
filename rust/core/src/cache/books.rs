//! What the requests of one cache have in common, and the steps in which pool and index change
//! together.

use std::sync::Arc;

use crate::content::{ContentId, DocumentBlock, Index};
use crate::heads::{HeadGroups, LocalWindow};
use crate::ids::BlockId;
use crate::pool::{Store, Stored};

use super::config::CacheConfig;
use super::stats::Tally;

/// Pool and index, under the lock.
pub(super) type State = Stored<Index>;

/// What the requests of one cache have in common.
pub(super) struct Common {
    pub(super) config: CacheConfig,
    pub(super) groups: HeadGroups,
    /// What each group keeps; `None` for all tokens.
    pub(super) windows: Vec<Option<LocalWindow>>,
    pub(super) store: Arc<Store<Index>>,
    pub(super) counters: Tally,
}

impl Common {
    /// Pages of one block of every group.
    pub(super) fn row_pages(&self) -> u64 {
        self.groups.pages().iter().map(|&pages| u64::from(pages)).sum()
    }

    pub(super) fn page_tokens(&self) -> usize {
        self.config.shape.page_tokens() as usize
    }
}

/// Gives up the pins of a node, if it has any; it may come back.
pub(super) fn release_pins(state: &mut State, content: ContentId) -> Vec<DocumentBlock> {
    let places = state.index.frozen.give_up(content);
    for _ in &places {
        state.pool.unpin(state.index.row(content));
    }
    note_quotas(state);
    places
}

/// Tells the pool what namespaces with a quota may have cached, where their pins have changed.
pub(super) fn note_quotas(state: &mut State) {
    for (account, allowed) in state.index.frozen.take_allowed() {
        state.pool.set_allowed(account, allowed);
    }
}

/// Tells the pool whether the index names these blocks.
pub(super) fn settle(state: &mut State, row: &[BlockId]) {
    let content = state.index.content_of(row[0]);
    if let Some(content) = content.filter(|&content| !state.index.is_member(content)) {
        // A frozen tail that grew into content another block stands for: that one may be pinned.
        release_pins(state, content);
        state.index.release_void(content);
    }
    for &block in row.iter().filter(|block| block.is_some()) {
        if state.index.names(block) {
            state.pool.mark_indexed(&[block]);
            if state.index.has_accounts() {
                state.pool.assign(block, state.index.account_of(block));
            }
        } else {
            state.pool.unindex(block);
        }
    }
}
