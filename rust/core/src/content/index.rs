//! The index over all blocks: what enters it, and how it forgets.

use crate::error::Error;
use crate::heads::LocalWindow;
use crate::ids::{BlockId, ScopeId};
use crate::pool::Evict;

use super::departed::Departed;
use super::frozen::FrozenPool;
use super::hash::{BlockHasher, Digest};
use super::ids::{ContentId, Link, Parent};
use super::nodes::Nodes;
use super::places::Places;
use super::scopes::Scopes;
use super::table::Table;

/// Of a small cache so many prefixes that had to go are remembered.
const DEPARTED: usize = 4096;

/// Prefix tree, virtual blocks, content search and frozen pool over one arena's blocks.
pub struct Index {
    pub(super) hasher: BlockHasher,
    pub(super) scopes: Scopes,
    pub(super) nodes: Nodes,
    pub(super) places: Places,
    pub(super) prefix: Table,
    pub(super) content: Table,
    pub(super) rolling: Table,
    pub(crate) frozen: FrozenPool,
    pub(super) departed: Departed,
}

impl Index {
    /// An empty index for `capacity` block numbers, pages of `page_tokens`, and head groups of
    /// which each keeps a window, or `None` for all tokens. What had to go is remembered while
    /// `generations` times what there is room for goes.
    ///
    /// # Errors
    /// `OutOfMemory` where its books find no room.
    pub fn new(
        hasher: BlockHasher,
        model: &str,
        capacity: usize,
        page_tokens: usize,
        windows: Vec<Option<LocalWindow>>,
        generations: usize,
    ) -> Result<Index, Error> {
        Ok(Index {
            hasher,
            scopes: Scopes::new(hasher, model),
            nodes: Nodes::new(capacity, page_tokens)?,
            places: Places::new(capacity, windows)?,
            prefix: Table::new(capacity)?,
            content: Table::new(capacity)?,
            rolling: Table::new(capacity)?,
            frozen: FrozenPool::default(),
            departed: Departed::new(capacity.saturating_mul(generations).max(DEPARTED))?,
        })
    }

    /// Whether a whole block of an exact prefix had to go before, as far as that is remembered.
    pub(crate) fn has_departed(&self, digest: Digest) -> bool {
        self.departed.knows(digest)
    }

    fn depart(&mut self, content: ContentId) {
        let node = self.nodes.get(content);
        if node.in_prefix && usize::from(node.prefix_len) == self.nodes.page_tokens() {
            self.departed.remember(node.digest);
        }
    }

    /// The number of a namespace in a RoPE regime, held until it is released.
    pub(crate) fn acquire_scope(&mut self, namespace: &str, regime: u64) -> ScopeId {
        self.scopes.acquire(namespace, regime)
    }

    pub(crate) fn hold_scope(&mut self, scope: ScopeId) {
        self.scopes.hold(scope);
    }

    pub(crate) fn release_scope(&mut self, scope: ScopeId) {
        self.scopes.release(scope);
    }

    /// Pairs of namespace and RoPE regime of which there is anything.
    pub(crate) fn namespaces(&self) -> usize {
        self.scopes.len()
    }

    /// The number of a namespace of which there is anything.
    pub(crate) fn scope(&self, namespace: &str, regime: u64) -> Option<ScopeId> {
        self.scopes.find(namespace, regime)
    }

    /// Whether a block can be found under a namespace, in any regime.
    pub(crate) fn is_of(&self, block: BlockId, namespace: &str) -> bool {
        let Some(content) = self.content_of(block) else { return false };
        let node = self.nodes.get(content);
        let named = |scope| self.scopes.namespace(scope) == namespace;
        node.in_prefix && named(node.prefix_scope) || node.in_content && named(node.content_scope)
    }

    /// The digest before the first block.
    pub(crate) fn root(&self, scope: ScopeId) -> Digest {
        self.scopes.get(scope).prefix
    }

    /// The blocks of a content, one a group; none where a window group's is gone.
    pub(crate) fn row(&self, content: ContentId) -> &[BlockId] {
        self.places.row(content)
    }

    /// The block of a content in one group; none where a window group's is gone.
    pub(crate) fn block(&self, content: ContentId, group: usize) -> BlockId {
        self.places.block(content, group)
    }

    /// The content that lies in a block, entered or being entered.
    pub(crate) fn content_of(&self, block: BlockId) -> Option<ContentId> {
        self.places.content(block).some()
    }

    /// Whether a content's blocks of all groups are there for others to hold.
    pub(crate) fn is_whole(&self, content: ContentId) -> bool {
        self.places.is_whole(content)
    }

    /// Whether the index names a block.
    pub(crate) fn names(&self, block: BlockId) -> bool {
        self.content_of(block).is_some_and(|content| self.nodes.is_member(content))
    }

    /// Says whether a block is kept from others, who would make it last longer than its request
    /// has reckoned with.
    pub(crate) fn withhold(&mut self, block: BlockId, withheld: bool) {
        self.places.withhold(block, withheld);
        if let Some(content) = self.content_of(block).filter(|_| !withheld) {
            self.announce(content);
        }
    }

    /// Blocks that are kept from others.
    pub(crate) fn withheld(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.places.withheld()
    }

    /// Gives the node of the same exact prefix, if another row stands for it, the blocks that it
    /// has lost: a window group's may go before the others.
    pub(crate) fn fill(
        &mut self,
        row: &[BlockId],
        scope: ScopeId,
        parent: Parent,
        digest: Digest,
        tokens: &[u32],
    ) {
        let known = self.find_child(digest.low(), scope, parent, tokens);
        if let Some(known) = known.filter(|&known| known != self.places.content(row[0])) {
            self.places.fill(known, row);
        }
    }

    /// Takes those blocks out of the content of a row that are not in the row; appends them to
    /// `out`.
    pub(crate) fn detach_others(&mut self, row: &[BlockId], out: &mut Vec<BlockId>) {
        let Some(content) = self.content_of(row[0]) else { return };
        let stored = self.places.row(content).to_vec();
        for block in stored.into_iter().filter(|block| block.is_some() && !row.contains(block)) {
            self.places.detach(block);
            out.push(block);
        }
    }

    pub(crate) fn link(&self, content: ContentId) -> Link {
        self.nodes.link(content)
    }

    pub(crate) fn follow(&self, link: Link) -> Option<ContentId> {
        self.nodes.follow(link)
    }

    pub(crate) fn is_member(&self, content: ContentId) -> bool {
        self.nodes.is_member(content)
    }

    /// Hits of a content since it was indexed.
    pub(crate) fn uses(&self, content: ContentId) -> u32 {
        self.nodes.get(content).uses
    }

    /// Counts a hit of a content; returns how many it has had. None if it is gone.
    pub(crate) fn count_use(&mut self, content: ContentId) -> Option<u32> {
        if !self.nodes.is_member(content) {
            return None;
        }
        let node = self.nodes.get_mut(content);
        node.uses = node.uses.saturating_add(1);
        Some(node.uses)
    }

    /// Takes a node out of the virtual index and the prefix tree while its content grows; it
    /// keeps its identity, so links to it stand.
    pub(crate) fn withdraw(&mut self, content: ContentId) {
        self.remove_content(content);
        self.remove_child(content);
    }

    /// Enters a row of blocks as a virtual block, or the node that stands for its text in the
    /// prefix tree, if there is one: an exact text has an encoding of its own. Another is not
    /// entered where its content is known already. An exact one replaces an approximate one that no
    /// knowledge base has pinned, and one whose blocks are all there replaces one of which some are
    /// gone.
    ///
    /// Returns the node that now stands for the content. Blocks that lost their last entry are
    /// appended to `forgotten`.
    pub(crate) fn register_content(
        &mut self,
        row: &[BlockId],
        entry: &ContentEntry<'_>,
        exact_text: Option<ContentId>,
        forgotten: &mut Vec<BlockId>,
    ) -> ContentId {
        let digest = self.content_digest(entry.scope, entry.tokens);
        let known = self.find_content_at(digest, entry.scope, entry.tokens);
        let here = self.content_of(row[0]);
        let mine = here.filter(|&here| self.is_entered(here, entry.scope, entry.tokens));
        let own = exact_text.filter(|&node| self.is_enterable(node, entry.scope));
        let stands = match (own, mine, known) {
            (None, Some(mine), _) => {
                // A fork has entered it, and may have let go of more.
                self.places.fill(mine, row);
                mine
            }
            (Some(own), ..) if self.nodes.get(own).in_content => own,
            (_, _, Some(old)) => {
                let all = |row: &[BlockId]| row.iter().all(|block| block.is_some());
                let (whole, exact) = match own {
                    Some(own) => (self.is_whole(own), true),
                    None => (all(row), entry.exact),
                };
                let better = match (whole, self.is_whole(old)) {
                    (true, false) => true,
                    (false, true) => false,
                    _ => exact && !self.nodes.get(old).exact,
                };
                let mut first = Some(old);
                if better && !self.frozen.is_pinned(old) {
                    self.remove_content(old);
                    self.forget_if_void(old, forgotten);
                    first = self.find_content_at(digest, entry.scope, entry.tokens);
                } else if own.is_none() {
                    return self.follow_up(entry, old);
                }
                self.enter_content(row, entry, own, digest, first)
            }
            (_, _, None) => self.enter_content(row, entry, own, digest, None),
        };
        self.follow_up(entry, stands)
    }

    /// Notes that a node comes after the one before it in a text.
    fn follow_up(&mut self, entry: &ContentEntry<'_>, stands: ContentId) -> ContentId {
        let before = entry.before.and_then(|link| self.neighbour(link, None));
        if let Some(before) = before.filter(|&before| before != stands) {
            self.link_content(before, stands);
        }
        stands
    }

    /// Whether a node stands in the virtual index for these tokens in this namespace.
    fn is_entered(&self, content: ContentId, scope: ScopeId, tokens: &[u32]) -> bool {
        self.nodes.get(content).in_content && self.is_content(content, scope, tokens)
    }

    /// Whether a node may stand in the virtual index of a namespace, or does: it stands in one.
    fn is_enterable(&self, content: ContentId, scope: ScopeId) -> bool {
        let node = self.nodes.get(content);
        !node.in_content || node.content_scope == scope
    }

    fn enter_content(
        &mut self,
        row: &[BlockId],
        entry: &ContentEntry<'_>,
        own: Option<ContentId>,
        digest: u64,
        first: Option<ContentId>,
    ) -> ContentId {
        let content = own.unwrap_or_else(|| self.write(row, entry.tokens, entry.position));
        self.insert_content(content, entry.scope, digest, own.is_some() || entry.exact, first);
        content
    }

    /// Notes what lies in a row of blocks: its content, new or grown. Blocks that the content has
    /// already stay.
    fn write(&mut self, row: &[BlockId], tokens: &[u32], position: u32) -> ContentId {
        let known = self.content_of(row[0]);
        let content = known.unwrap_or_else(|| self.nodes.allocate());
        if self.nodes.write(content, tokens, position) {
            // A block of a window group may have gone to another content, which had lost its own.
            self.places.fill(content, row);
        }
        content
    }

    /// Enters a whole block into the prefix tree, unless the same prefix is there already.
    /// Returns the node that now stands for it; none if the row's own block already stands below
    /// another parent, as a fork's may.
    pub(crate) fn register_prefix(
        &mut self,
        row: &[BlockId],
        scope: ScopeId,
        parent: Parent,
        digest: Digest,
        tokens: &[u32],
        position: u32,
    ) -> Option<ContentId> {
        // Below the end of a text, where most blocks are entered, there is nothing to look for.
        let any = self.first_child(scope, parent).some();
        let known = any.and_then(|_| self.find_child(digest.low(), scope, parent, tokens));
        if let Some(known) = known {
            if known == self.places.content(row[0]) {
                self.places.fill(known, row);
            }
            return Some(known);
        }
        if let Some(here) = self.content_of(row[0]) {
            let node = self.nodes.get(here);
            if node.in_prefix && usize::from(node.prefix_len) == self.nodes.page_tokens() {
                return None;
            }
            self.remove_child(here);
        }
        let content = self.write(row, tokens, position);
        self.insert_child(content, scope, parent, Some(digest), tokens.len());
        Some(content)
    }

    /// Enters the exact head (`exact` of `tokens`) of an incomplete block below its parent, for
    /// matches inside a block, unless another child has it. Returns the node that stands for all of
    /// its tokens there, if they are exact.
    pub(crate) fn register_tail(
        &mut self,
        row: &[BlockId],
        scope: ScopeId,
        parent: Parent,
        tokens: &[u32],
        exact: usize,
        position: u32,
    ) -> Option<ContentId> {
        let known = self.longest_child(scope, parent, &tokens[..exact]);
        let node = match known {
            Some((known, common)) if common == exact => known,
            _ => {
                if let Some(here) = self.content_of(row[0]) {
                    self.remove_child(here);
                }
                let content = self.write(row, tokens, position);
                self.insert_child(content, scope, parent, None, exact);
                content
            }
        };
        let all = self.nodes.tokens(node) == tokens && exact == tokens.len();
        all.then_some(node)
    }

    /// Whether a node has exactly these tokens, and stands in the virtual index of this namespace
    /// or may be entered there.
    pub(crate) fn holds(&self, content: ContentId, scope: ScopeId, tokens: &[u32]) -> bool {
        self.nodes.tokens(content) == tokens && self.is_enterable(content, scope)
    }

    /// Enters a node that holds the tokens of `entry` by its content, if it is not.
    pub(crate) fn ensure_content(&mut self, content: ContentId, entry: &ContentEntry<'_>) {
        if !self.nodes.get(content).in_content {
            let digest = self.content_digest(entry.scope, entry.tokens);
            let first = self.find_content_at(digest, entry.scope, entry.tokens);
            self.insert_content(content, entry.scope, digest, entry.exact, first);
        }
    }

    /// Takes a node out of the virtual index. Blocks that lost their last entry are appended to
    /// `forgotten`.
    pub(crate) fn forget_content(&mut self, content: ContentId, forgotten: &mut Vec<BlockId>) {
        self.remove_content(content);
        self.forget_if_void(content, forgotten);
    }

    /// Takes everything below a node out of the prefix tree: without it they cannot be reached.
    fn forget_children(&mut self, content: ContentId, forgotten: &mut Vec<BlockId>) {
        let mut heads = vec![self.nodes.get(content).first_child];
        self.nodes.get_mut(content).first_child = ContentId::NONE;
        while let Some(mut child) = heads.pop() {
            while child.is_some() {
                let node = *self.nodes.get(child);
                heads.push(node.first_child);
                self.depart(child);
                self.remove_child(child);
                self.nodes.get_mut(child).first_child = ContentId::NONE;
                self.forget_if_void(child, forgotten);
                child = node.next_sibling;
            }
        }
    }

    fn forget_if_void(&mut self, content: ContentId, forgotten: &mut Vec<BlockId>) {
        if !self.nodes.is_member(content) {
            if self.nodes.get(content).first_child.is_some() {
                self.forget_children(content, forgotten);
            }
            forgotten.extend(self.places.row(content).iter().filter(|block| block.is_some()));
            self.clear(content);
        }
    }

    fn clear(&mut self, content: ContentId) {
        self.places.clear(content);
        self.nodes.clear(content);
    }

    /// Tokens that are known of a block.
    pub(crate) fn known_tokens(&self, block: BlockId) -> usize {
        let content = self.content_of(block).filter(|&content| self.is_member(content));
        content.map_or(0, |content| self.nodes.tokens(content).len())
    }

    pub(crate) fn in_prefix(&self, content: ContentId) -> bool {
        self.nodes.get(content).in_prefix
    }

    /// The digest of a block after `parent`.
    #[must_use]
    pub fn hash(&self, parent: Digest, tokens: &[u32]) -> Digest {
        self.hasher.chain(parent, tokens)
    }

    /// Clears a node that was withdrawn and for which another content stands.
    pub(crate) fn release_void(&mut self, content: ContentId) {
        self.clear(content);
    }
}

/// A virtual block to be entered.
pub(crate) struct ContentEntry<'a> {
    pub(crate) scope: ScopeId,
    pub(crate) tokens: &'a [u32],
    /// Position of slot 0.
    pub(crate) position: u32,
    /// Whether the KV is exact in its own context.
    pub(crate) exact: bool,
    /// The block before in the same text.
    pub(crate) before: Option<Link>,
}

impl Evict for Index {
    fn evicted(&mut self, block: BlockId, forgotten: &mut Vec<BlockId>) {
        let Some(content) = self.content_of(block) else { return };
        if self.places.stands_without(content, block) {
            self.places.detach(block);
            return;
        }
        self.depart(content);
        self.withdraw(content);
        self.forget_if_void(content, forgotten);
    }
}
