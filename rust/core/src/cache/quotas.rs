//! Quotas of namespaces: what a namespace keeps beyond its own yields to others.
//!
//! A quota counts blocks of every head group that can be found under the namespace and that no live
//! request holds. Documents may never pin more. What is cached beside them may, while there is room
//! for it: it is what is evicted first. What a live request takes is its scheduler's concern.

use std::cmp::Reverse;

use crate::content::ContentId;
use crate::error::Error;
use crate::ids::AccountId;

use super::KvCache;
use super::books::{State, note_quotas};
use super::freeze;

impl KvCache {
    /// Gives a namespace a quota of so many blocks of every head group, changes it, or takes it
    /// away (`None`). Frozen blocks beyond it lose their pin, the least used first: they are cached
    /// like any other, and pinned again when the quota has room.
    ///
    /// # Errors
    /// `InvalidArgument` for more than 65536 quotas, `OutOfMemory` where the books of the first one
    /// find no room. Nothing has changed then.
    pub fn set_quota(&self, namespace: &str, blocks: Option<usize>) -> Result<(), Error> {
        let common = &self.0;
        let mut stored = common.store.lock();
        let state = &mut *stored;
        match (state.index.account(namespace), blocks) {
            (None, None) => return Ok(()),
            (Some(account), Some(blocks)) => {
                state.index.frozen.set_quota(namespace, account, Some(blocks));
                yield_pins(state, account);
            }
            (None, Some(blocks)) => {
                let account = state.index.free_account()?;
                state.pool.open_account(account, blocks)?;
                state.index.set_account(namespace, Some(account));
                state.index.frozen.set_quota(namespace, account, Some(blocks));
                assign_all(state, account);
                yield_pins(state, account);
            }
            (Some(account), None) => {
                state.index.frozen.set_quota(namespace, account, None);
                state.index.set_account(namespace, None);
                state.pool.close_account(account);
            }
        }
        note_quotas(state);
        freeze::regrow(common, state);
        Ok(())
    }
}

/// Tells the pool which blocks are an account's.
fn assign_all(state: &mut State, account: AccountId) {
    for content in state.index.members() {
        for &block in state.index.row(content).iter().filter(|block| block.is_some()) {
            if state.index.account_of(block) == Some(account) {
                state.pool.assign(block, Some(account));
            }
        }
    }
}

/// Gives up the pins of a namespace that are beyond its quota; those of others on the same blocks
/// stay.
fn yield_pins(state: &mut State, account: AccountId) {
    let (blocks, pinned) = state.index.frozen.charge(account);
    let mut charged: Vec<ContentId> = state.index.frozen.charged(account).collect();
    charged.sort_unstable_by_key(|&content| (state.index.uses(content), Reverse(content)));
    for content in charged.into_iter().take(pinned.saturating_sub(blocks)) {
        for _ in 0..state.index.frozen.give_up_of(account, content) {
            state.pool.unpin(state.index.row(content));
        }
    }
}
