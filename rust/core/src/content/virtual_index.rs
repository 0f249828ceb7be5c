//! Virtual blocks (SparseX §4.4): content in a namespace -> a block and the position of its K.
//!
//! They own no memory and no reference: evicting the block removes them. Links lead to the blocks
//! that stood before and after in the donor's text.

use crate::ids::ScopeId;

use super::ids::{ContentId, Link};
use super::index::Index;
use super::nodes::{Links, common_head};

impl Index {
    /// The first of the blocks with exactly these tokens in this namespace.
    pub(crate) fn find_content(&self, scope: ScopeId, tokens: &[u32]) -> Option<ContentId> {
        self.find_content_at(self.content_digest(scope, tokens), scope, tokens)
    }

    /// The same, if there is one whose blocks are all there for others to hold.
    pub(crate) fn find_whole(&self, scope: ScopeId, tokens: &[u32]) -> Option<ContentId> {
        let first = self.find_content(scope, tokens)?;
        self.whole_alike(first).next()
    }

    /// The virtual hash, cut to a table scope.
    pub(super) fn content_digest(&self, scope: ScopeId, tokens: &[u32]) -> u64 {
        self.hasher.chain(self.scopes.get(scope).content, tokens).low()
    }

    pub(super) fn find_content_at(
        &self,
        digest: u64,
        scope: ScopeId,
        tokens: &[u32],
    ) -> Option<ContentId> {
        self.content.find(digest, |block| self.is_content(block, scope, tokens))
    }

    /// Whether another text of the same namespace has the digest of these tokens.
    pub(super) fn content_collides(&self, scope: ScopeId, tokens: &[u32]) -> bool {
        let digest = self.content_digest(scope, tokens);
        let foreign = |block: ContentId| {
            self.nodes.links(block).content_key == digest
                && self.nodes.get(block).content_scope == scope
                && self.nodes.tokens(block) != tokens
        };
        self.content.find(digest, foreign).is_some()
    }

    pub(super) fn is_content(&self, block: ContentId, scope: ScopeId, tokens: &[u32]) -> bool {
        self.nodes.get(block).content_scope == scope && self.nodes.tokens(block) == tokens
    }

    /// Enters a node by its content, behind `first`, the first of the same content that stands in
    /// the tables, where there is one.
    pub(super) fn insert_content(
        &mut self,
        block: ContentId,
        scope: ScopeId,
        digest: u64,
        exact: bool,
        first: Option<ContentId>,
    ) {
        let tokens = self.nodes.tokens(block);
        debug_assert_eq!(first, self.find_content_at(digest, scope, tokens));
        let domain = self.scopes.get(scope).content;
        let roll = self.hasher.roll_key(self.hasher.roll(tokens), domain);
        let node = self.nodes.get_mut(block);
        node.in_content = true;
        node.content_scope = scope;
        node.exact = exact;
        let links = self.nodes.links_mut(block);
        (links.content_key, links.roll_key) = (digest, roll);
        self.scopes.hold(scope);
        match first {
            Some(first) => self.join_alike(first, block),
            None => self.enter_tables(block),
        }
    }

    fn enter_tables(&mut self, block: ContentId) {
        let Index { nodes, content, rolling, .. } = self;
        let Links { content_key, roll_key, .. } = *nodes.links(block);
        content.insert(content_key, block, |block| nodes.links(block).content_key);
        if nodes.tokens(block).len() == nodes.page_tokens() {
            rolling.insert(roll_key, block, |block| nodes.links(block).roll_key);
        }
    }

    /// Whether a node stands in the tables for those of its content.
    pub(super) fn is_first_alike(&self, block: ContentId) -> bool {
        self.nodes.get(block).in_content && !self.nodes.links(block).prev_alike.is_some()
    }

    pub(super) fn remove_content(&mut self, block: ContentId) {
        let node = *self.nodes.get(block);
        if !node.in_content {
            return;
        }
        if self.is_first_alike(block) {
            let links = *self.nodes.links(block);
            self.content.remove(links.content_key, block);
            if usize::from(node.len) == self.nodes.page_tokens() {
                self.rolling.remove(links.roll_key, block);
            }
        }
        self.nodes.get_mut(block).in_content = false;
        if let Some(next) = self.leave_alike(block) {
            self.enter_tables(next);
        }
        self.scopes.release(node.content_scope);
    }

    /// Notes that `after` follows `before` in some text. A link that stands is kept, unless it
    /// leads to a shorter head of the same continuation.
    pub(super) fn link_content(&mut self, before: ContentId, after: ContentId) {
        let before_link = self.nodes.link(before);
        let after_link = self.nodes.link(after);
        if self.neighbour(self.nodes.links(after).before, None).is_none() {
            self.nodes.links_mut(after).before = before_link;
        }
        let replace = match self.neighbour(self.nodes.links(before).after, None) {
            None => true,
            Some(old) => {
                let (old, new) = (self.nodes.tokens(old), self.nodes.tokens(after));
                old.len() < new.len() && common_head(old, new) == old.len()
            }
        };
        if replace {
            self.nodes.links_mut(before).after = after_link;
        }
    }

    /// The virtual block that a link leads to, if it stands and is of this namespace.
    pub(super) fn neighbour(&self, link: Link, scope: Option<ScopeId>) -> Option<ContentId> {
        self.nodes.follow(link).filter(|&block| {
            let node = self.nodes.get(block);
            node.in_content && scope.is_none_or(|scope| node.content_scope == scope)
        })
    }
}
