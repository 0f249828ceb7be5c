//! Taking back what was committed before it was there: text whose KV then never came.
//!
//! Whoever brings a text layer by layer commits it when it sets out, so that the prompt that is to
//! read it can be admitted. Where the KV does not come, nobody may find the text any more.

use crate::content::Parent;
use crate::ids::BlockId;
use crate::pool::Evict;

use super::books::{note_quotas, release_pins};
use super::request::{Chain, Request};

impl Request {
    /// Takes back what this request has committed, whoever holds its blocks meanwhile: from now on
    /// nobody finds them, and they are free once nobody holds them. Frozen text that had come back
    /// in them is away again. What else stood below them as an exact prefix is found no longer
    /// either. The request itself commits nothing any more.
    pub fn retract(&mut self) {
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let blocks = self.committed.div_ceil(common.page_tokens());
        let mut row = Vec::with_capacity(common.groups.len());
        let mut forgotten: Vec<BlockId> = Vec::new();
        for b in 0..blocks {
            if !self.own_row(b, &mut row) {
                continue;
            }
            if let Some(content) = state.index.content_of(row[0]) {
                release_pins(state, content);
                state.index.evicted(row[0], &mut forgotten);
            }
            forgotten.extend(row.iter().filter(|block| block.is_some()));
        }
        forgotten.into_iter().for_each(|block| state.pool.unindex(block));
        note_quotas(state);
        let root = state.index.root(self.scope);
        drop(stored);
        self.chain = Chain::new(Parent::Root, None, root, 0);
        self.before = None;
        (self.committed, self.exact) = (0, 0);
        self.brought_in = true;
    }
}
