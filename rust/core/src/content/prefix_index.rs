//! Exact prefixes: a table of full blocks and, below each block, the list of what followed it.
//!
//! A whole block is found below the one before: by tokens alone where that was last continued the
//! same way, by chained digest where it branches. Where the next block is not cached whole, the
//! list of children gives the longest common head, so a prefix may end inside a block.

use crate::ids::ScopeId;

use super::hash::Digest;
use super::ids::{ContentId, Parent};
use super::index::Index;
use super::nodes::common_head;

/// Children looked at for a match inside a block: bounds the time under the lock where very many
/// texts share a prefix. The latest are looked at first.
const CHILDREN: usize = 1024;

/// The longest cached prefix of a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefixMatch {
    /// The last whole block.
    pub(crate) parent: Parent,
    /// The digest of the whole blocks.
    pub(crate) digest: Digest,
    /// A block whose first tokens continue the prefix, and how many.
    pub(crate) partial: Option<(ContentId, usize)>,
}

impl Index {
    /// Finds the longest cached prefix of `tokens` after which every head group has what the next
    /// row sees; appends its whole blocks to `out`.
    pub(crate) fn match_prefix(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        out: &mut Vec<ContentId>,
    ) -> PrefixMatch {
        let page = self.nodes.page_tokens();
        let root = self.scopes.get(scope).prefix;
        let (mut parent, mut partial) = self.walk_prefix(scope, tokens, out);
        let matched = out.len() * page;
        let end = matched + partial.map_or(0, |(_, tokens)| tokens);
        let whole = partial.is_none_or(|(block, _)| self.places.is_whole(block));
        if !whole || self.usable_blocks(out, end) < out.len() {
            partial = None;
            out.truncate(self.usable_blocks(out, matched));
            parent = out.last().map_or(Parent::Root, |&block| Parent::Content(block));
        }
        PrefixMatch { parent, digest: self.digest_of(parent, root), partial }
    }

    /// The longest cached prefix of `tokens`, whatever is left of it in window groups: appends its
    /// whole blocks to `out`, returns the last one and a block that goes on, and how far.
    pub(super) fn walk_prefix(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        out: &mut Vec<ContentId>,
    ) -> (Parent, Option<(ContentId, usize)>) {
        let page = self.nodes.page_tokens();
        let root = self.scopes.get(scope).prefix;
        let mut parent = Parent::Root;
        let mut matched = 0;
        for tokens in tokens.chunks_exact(page) {
            let block = self.latest_child(scope, parent, tokens).or_else(|| {
                let digest = self.hasher.chain(self.digest_of(parent, root), tokens);
                self.find_child(digest.low(), scope, parent, tokens)
            });
            let Some(block) = block else { break };
            out.push(block);
            parent = Parent::Content(block);
            matched += page;
        }
        (parent, self.longest_child(scope, parent, &tokens[matched..]))
    }

    /// How many of the tokens that follow a text are of whole blocks that were cached behind it and
    /// had to go, as far as that is remembered: its digest, and what follows.
    pub(crate) fn departed_after(&self, mut digest: Digest, tokens: &[u32]) -> usize {
        let page = self.nodes.page_tokens();
        let departed = |tokens: &&[u32]| {
            digest = self.hasher.chain(digest, tokens);
            self.has_departed(digest)
        };
        tokens.chunks_exact(page).take_while(departed).count() * page
    }

    /// How many blocks of a prefix that ends at `end` can be used: all, or as many as the longest
    /// prefix of whole blocks has of which the window groups still store what the next row sees.
    fn usable_blocks(&self, blocks: &[ContentId], end: usize) -> usize {
        let page = self.nodes.page_tokens();
        let (mut usable, mut end) = (blocks.len(), end);
        if self.places.windows().iter().all(Option::is_none) {
            return usable;
        }
        let windows = || self.places.windows().iter().enumerate();
        // The first block that is gone cuts the prefix; a shorter one needs earlier blocks.
        let gone = |blocks: &[ContentId], end: usize| {
            let needed = windows().filter_map(|(group, window)| {
                let window = (*window)?;
                let seen = |b: &usize| window.sees(end, &(b * page..(b + 1) * page));
                let late = window.first(end) / page..blocks.len();
                let sink = 0..window.sink.div_ceil(page).min(blocks.len());
                let all = sink.chain(late).filter(seen);
                all.filter(|&b| !self.places.offers(blocks[b], group)).min()
            });
            needed.min()
        };
        while let Some(b) = gone(&blocks[..usable], end) {
            (usable, end) = (b, b * page);
        }
        usable
    }

    /// The digests of the whole blocks of a prompt.
    pub(crate) fn digests(&self, root: Digest, tokens: &[u32]) -> Vec<Digest> {
        let page = self.nodes.page_tokens();
        let mut digests = Vec::with_capacity(tokens.len() / page);
        let mut digest = root;
        for tokens in tokens.chunks_exact(page) {
            digest = self.hasher.chain(digest, tokens);
            digests.push(digest);
        }
        digests
    }

    /// How many blocks of a prompt whose digests are known are cached, from the first on.
    pub(crate) fn match_digests(
        &self,
        scope: ScopeId,
        digests: &[Digest],
        tokens: &[u32],
    ) -> usize {
        let page = self.nodes.page_tokens();
        let mut parent = Parent::Root;
        let mut blocks = Vec::with_capacity(digests.len());
        for (digest, tokens) in digests.iter().zip(tokens.chunks_exact(page)) {
            let block = self
                .latest_child(scope, parent, tokens)
                .or_else(|| self.find_child(digest.low(), scope, parent, tokens));
            let Some(block) = block else { break };
            parent = Parent::Content(block);
            blocks.push(block);
        }
        self.usable_blocks(&blocks, blocks.len() * page)
    }

    /// The child entered last, if it has these tokens. Most blocks have one child, and then a
    /// prefix is walked without hashing: what counts is token equality below the same parent.
    fn latest_child(&self, scope: ScopeId, parent: Parent, tokens: &[u32]) -> Option<ContentId> {
        let child = self.first_child(scope, parent);
        let same = child.is_some()
            && usize::from(self.nodes.get(child).prefix_len) == tokens.len()
            && self.nodes.tokens(child) == tokens;
        same.then_some(child)
    }

    pub(super) fn digest_of(&self, parent: Parent, root: Digest) -> Digest {
        match parent {
            Parent::Root => root,
            Parent::Content(block) => self.nodes.get(block).digest,
        }
    }

    /// The full block with these tokens below `parent`. Digest, parent and tokens must all agree.
    pub(super) fn find_child(
        &self,
        digest: u64,
        scope: ScopeId,
        parent: Parent,
        tokens: &[u32],
    ) -> Option<ContentId> {
        self.prefix.find(digest, |block| {
            let node = self.nodes.get(block);
            node.parent == parent
                && node.prefix_scope == scope
                && self.nodes.tokens(block) == tokens
        })
    }

    pub(super) fn first_child(&self, scope: ScopeId, parent: Parent) -> ContentId {
        match parent {
            Parent::Root => self.scopes.get(scope).first_child,
            Parent::Content(block) => self.nodes.get(block).first_child,
        }
    }

    pub(super) fn longest_child(
        &self,
        scope: ScopeId,
        parent: Parent,
        tokens: &[u32],
    ) -> Option<(ContentId, usize)> {
        let mut best: Option<(ContentId, usize)> = None;
        if tokens.is_empty() {
            return best;
        }
        let mut child = self.first_child(scope, parent);
        for _ in 0..CHILDREN {
            if !child.is_some() || best.is_some_and(|(_, n)| n == tokens.len()) {
                break;
            }
            let known = usize::from(self.nodes.get(child).prefix_len);
            let common = common_head(&self.nodes.tokens(child)[..known], tokens);
            if common > best.map_or(0, |(_, n)| n) {
                best = Some((child, common));
            }
            child = self.nodes.get(child).next_sibling;
        }
        best
    }

    /// Puts a node under its parent; a whole block also into the table.
    pub(super) fn insert_child(
        &mut self,
        block: ContentId,
        scope: ScopeId,
        parent: Parent,
        digest: Option<Digest>,
        prefix_len: usize,
    ) {
        let head = self.first_child(scope, parent);
        if head.is_some() {
            self.nodes.get_mut(head).prev_sibling = block;
        }
        let node = self.nodes.get_mut(block);
        node.in_prefix = true;
        node.prefix_scope = scope;
        node.parent = parent;
        node.prefix_len = prefix_len as u16;
        node.prev_sibling = ContentId::NONE;
        node.next_sibling = head;
        if let Some(digest) = digest {
            node.digest = digest;
            let Index { nodes, prefix, .. } = self;
            prefix.insert(digest.low(), block, |block| nodes.get(block).digest.low());
        }
        self.set_first_child(scope, parent, block);
        self.scopes.hold(scope);
    }

    fn set_first_child(&mut self, scope: ScopeId, parent: Parent, child: ContentId) {
        match parent {
            Parent::Root => self.scopes.get_mut(scope).first_child = child,
            Parent::Content(block) => self.nodes.get_mut(block).first_child = child,
        }
    }

    /// Takes a node out of the prefix tree. Its children stay behind; see `forget_children`.
    pub(super) fn remove_child(&mut self, block: ContentId) {
        let node = *self.nodes.get(block);
        if !node.in_prefix {
            return;
        }
        if usize::from(node.prefix_len) == self.nodes.page_tokens() {
            self.prefix.remove(node.digest.low(), block);
        }
        if node.prev_sibling.is_some() {
            self.nodes.get_mut(node.prev_sibling).next_sibling = node.next_sibling;
        } else {
            self.set_first_child(node.prefix_scope, node.parent, node.next_sibling);
        }
        if node.next_sibling.is_some() {
            self.nodes.get_mut(node.next_sibling).prev_sibling = node.prev_sibling;
        }
        let left = self.nodes.get_mut(block);
        left.in_prefix = false;
        left.prefix_len = 0;
        self.scopes.release(node.prefix_scope);
    }
}
