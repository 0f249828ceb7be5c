//! Blocks of equal content that stand in different texts, and which of them a prompt reads.
//!
//! The KV of a block depends on all text before it, so two documents with a common passage have two
//! encodings of it. Nodes of one content in one namespace form a list; its first node stands in the
//! tables. A lookup prefers the node whose text agrees longest with the prompt before the block.

use crate::ids::ScopeId;

use super::ids::ContentId;
use super::index::Index;
use super::nodes::common_tail;

/// Nodes of one content that are compared: bounds the time under the lock where a text repeats.
const COMPARED: usize = 16;
/// Blocks before a block that are compared with the prompt.
const BEFORE: usize = 64;

impl Index {
    /// The nodes of a list from one of them on.
    fn alike_from(&self, first: ContentId) -> impl Iterator<Item = ContentId> + '_ {
        let next = |block: &ContentId| {
            let next = self.nodes.links(*block).next_alike;
            next.is_some().then_some(next)
        };
        std::iter::successors(Some(first), next)
    }

    /// The nodes of one content that others may hold, the first ones of the list.
    pub(super) fn whole_alike(&self, first: ContentId) -> impl Iterator<Item = ContentId> + '_ {
        self.alike_from(first).take(COMPARED).filter(|&block| self.is_whole(block))
    }

    /// Of the nodes alike to `first`, the one whose text agrees longest with `before`, the prompt's
    /// tokens that precede the block. `left` is the donor that the prompt reads there: a node that
    /// follows it continues what was chosen for the same reason.
    pub(super) fn nearest(
        &self,
        scope: ScopeId,
        first: ContentId,
        before: &[u32],
        left: Option<ContentId>,
    ) -> Option<ContentId> {
        let all = || self.whole_alike(first);
        let mut nearest = all().next()?;
        if all().nth(1).is_none() {
            return Some(nearest);
        }
        let follows = |&block: &ContentId| left.is_some() && self.before(block, scope) == left;
        if let Some(block) = all().find(follows) {
            return Some(block);
        }
        let mut longest = 0;
        for block in all() {
            let run = self.run_before(scope, block, before);
            if run > longest {
                (nearest, longest) = (block, run);
            }
        }
        Some(nearest)
    }

    /// How many tokens before a block are those that its own text has there, as far as is looked.
    pub(super) fn run_before(&self, scope: ScopeId, block: ContentId, before: &[u32]) -> usize {
        let (mut block, mut end) = (block, before.len());
        for _ in 0..BEFORE {
            let Some(previous) = self.before(block, scope) else { break };
            let stored = self.nodes.tokens(previous);
            let common = common_tail(stored, &before[..end]);
            end -= common;
            if common < stored.len() {
                break;
            }
            block = previous;
        }
        before.len() - end
    }

    /// The whole block that stands before another in its text.
    pub(super) fn before(&self, block: ContentId, scope: ScopeId) -> Option<ContentId> {
        let before = self.neighbour(self.nodes.links(block).before, Some(scope));
        before.filter(|&before| self.nodes.tokens(before).len() == self.nodes.page_tokens())
    }

    /// Puts a node behind the first of its content.
    pub(super) fn join_alike(&mut self, first: ContentId, block: ContentId) {
        let next = std::mem::replace(&mut self.nodes.links_mut(first).next_alike, block);
        let links = self.nodes.links_mut(block);
        (links.prev_alike, links.next_alike) = (first, next);
        if next.is_some() {
            self.nodes.links_mut(next).prev_alike = block;
        }
    }

    /// Takes a node out of its list; returns the one that is first now if this one was, and there
    /// is another.
    pub(super) fn leave_alike(&mut self, block: ContentId) -> Option<ContentId> {
        let links = self.nodes.links_mut(block);
        let prev = std::mem::replace(&mut links.prev_alike, ContentId::NONE);
        let next = std::mem::replace(&mut links.next_alike, ContentId::NONE);
        if next.is_some() {
            self.nodes.links_mut(next).prev_alike = prev;
        }
        if prev.is_some() {
            self.nodes.links_mut(prev).next_alike = next;
            return None;
        }
        next.is_some().then_some(next)
    }
}
