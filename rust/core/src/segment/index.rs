//! The index over all blocks: what enters it, and how it forgets.

use crate::error::Error;
use crate::heads::LocalWindow;
use crate::ids::{BlockId, ScopeId};
use crate::pool::Evict;

use super::frozen::FrozenPool;
use super::hash::{BlockHasher, Digest};
use super::nodes::{Link, Nodes, Parent};
use super::scopes::Scopes;
use super::table::Table;

/// Prefix tree, virtual blocks, content search and frozen pool over one arena's blocks.
pub struct Index {
    pub(super) hasher: BlockHasher,
    pub(super) scopes: Scopes,
    pub(super) nodes: Nodes,
    pub(super) prefix: Table,
    pub(super) content: Table,
    pub(super) rolling: Table,
    pub(crate) frozen: FrozenPool,
}

impl Index {
    /// An empty index for `capacity` block numbers, pages of `page_tokens`, and head groups of
    /// which each keeps a window, or `None` for all tokens.
    ///
    /// # Errors
    /// `OutOfMemory` where its books find no room.
    pub fn new(
        hasher: BlockHasher,
        model: &str,
        capacity: usize,
        page_tokens: usize,
        windows: Vec<Option<LocalWindow>>,
    ) -> Result<Index, Error> {
        Ok(Index {
            hasher,
            scopes: Scopes::new(hasher, model),
            nodes: Nodes::new(capacity, page_tokens, windows)?,
            prefix: Table::new(capacity)?,
            content: Table::new(capacity)?,
            rolling: Table::new(capacity)?,
            frozen: FrozenPool::default(),
        })
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

    /// The digest before the first block.
    pub(crate) fn root(&self, scope: ScopeId) -> Digest {
        self.scopes.get(scope).prefix
    }

    /// The blocks of a node, one a group; none where a window group's is gone.
    pub(crate) fn row(&self, anchor: BlockId) -> &[BlockId] {
        self.nodes.row(anchor)
    }

    /// Whether a node's blocks of all groups are there for others to hold.
    pub(crate) fn is_whole(&self, anchor: BlockId) -> bool {
        self.nodes.is_whole(anchor)
    }

    /// Whether the index names a block.
    pub(crate) fn names(&self, block: BlockId) -> bool {
        let anchor = self.nodes.anchor(block);
        anchor.is_some() && self.nodes.is_member(anchor)
    }

    /// Says whether a block is kept from others, who would make it last longer than its request
    /// has reckoned with.
    pub(crate) fn withhold(&mut self, block: BlockId, withheld: bool) {
        self.nodes.withhold(block, withheld);
        let anchor = self.nodes.anchor(block);
        if !withheld && anchor.is_some() {
            self.announce(anchor);
        }
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
        if let Some(known) = known.filter(|&known| known != row[0]) {
            self.nodes.fill(known, row);
        }
    }

    /// Takes those blocks out of a node that are not in `row`; appends them to `out`.
    pub(crate) fn detach_others(&mut self, row: &[BlockId], out: &mut Vec<BlockId>) {
        let stored = self.nodes.row(row[0]).to_vec();
        for block in stored.into_iter().filter(|block| block.is_some() && !row.contains(block)) {
            self.nodes.detach(block);
            out.push(block);
        }
    }

    pub(crate) fn link(&self, anchor: BlockId) -> Link {
        self.nodes.link(anchor)
    }

    pub(crate) fn follow(&self, link: Link) -> Option<BlockId> {
        self.nodes.follow(link)
    }

    pub(crate) fn is_member(&self, anchor: BlockId) -> bool {
        self.nodes.is_member(anchor)
    }

    /// Hits of a node since it was indexed.
    pub(crate) fn uses(&self, anchor: BlockId) -> u32 {
        self.nodes.get(anchor).uses
    }

    /// Counts a hit of a node; returns how many it has had.
    pub(crate) fn count_use(&mut self, anchor: BlockId) -> u32 {
        let node = self.nodes.get_mut(anchor);
        node.uses = node.uses.saturating_add(1);
        node.uses
    }

    /// Takes a node out of the virtual index and the prefix tree while its content grows; it
    /// keeps its identity, so links to it stand.
    pub(crate) fn withdraw(&mut self, anchor: BlockId) {
        self.remove_content(anchor);
        self.remove_child(anchor);
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
        exact_text: Option<BlockId>,
        forgotten: &mut Vec<BlockId>,
    ) -> BlockId {
        let digest = self.content_digest(entry.scope, entry.tokens);
        let known = self.find_content_at(digest, entry.scope, entry.tokens);
        let mine = self.is_entered(row[0], entry.scope, entry.tokens);
        let own = exact_text.filter(|&node| self.is_enterable(node, entry.scope));
        let stands = match (own, known) {
            (None, _) if mine => {
                // A fork has entered it, and may have let go of more.
                self.nodes.fill(row[0], row);
                row[0]
            }
            (Some(own), _) if self.nodes.get(own).in_content => own,
            (_, Some(old)) => {
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
                if better && !self.frozen.is_pinned(old) {
                    self.remove_content(old);
                    self.forget_if_void(old, forgotten);
                } else if own.is_none() {
                    return self.follow_up(entry, old);
                }
                self.enter_content(row, entry, own, digest)
            }
            (_, None) => self.enter_content(row, entry, own, digest),
        };
        self.follow_up(entry, stands)
    }

    /// Notes that a node comes after the one before it in a text.
    fn follow_up(&mut self, entry: &ContentEntry<'_>, stands: BlockId) -> BlockId {
        let before = entry.before.and_then(|link| self.neighbour(link, None));
        if let Some(before) = before.filter(|&before| before != stands) {
            self.link_content(before, stands);
        }
        stands
    }

    /// Whether a node stands in the virtual index for these tokens in this namespace.
    fn is_entered(&self, anchor: BlockId, scope: ScopeId, tokens: &[u32]) -> bool {
        self.nodes.get(anchor).in_content && self.is_content(anchor, scope, tokens)
    }

    /// Whether a node may stand in the virtual index of a namespace, or does: it stands in one.
    fn is_enterable(&self, anchor: BlockId, scope: ScopeId) -> bool {
        let node = self.nodes.get(anchor);
        !node.in_content || node.content_scope == scope
    }

    fn enter_content(
        &mut self,
        row: &[BlockId],
        entry: &ContentEntry<'_>,
        own: Option<BlockId>,
        digest: u64,
    ) -> BlockId {
        let Some(own) = own else {
            self.nodes.write(row, entry.tokens, entry.position);
            self.insert_content(row[0], entry.scope, digest, entry.exact);
            return row[0];
        };
        self.insert_content(own, entry.scope, digest, true);
        own
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
    ) -> Option<BlockId> {
        let known = self.find_child(digest.low(), scope, parent, tokens);
        if let Some(known) = known {
            if known == row[0] {
                self.nodes.fill(known, row);
            }
            return Some(known);
        }
        let node = self.nodes.get(row[0]);
        if node.in_prefix {
            if usize::from(node.prefix_len) == self.nodes.page_tokens() {
                return None;
            }
            self.remove_child(row[0]);
        }
        self.nodes.write(row, tokens, position);
        self.insert_child(row[0], scope, parent, Some(digest), tokens.len());
        Some(row[0])
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
    ) -> Option<BlockId> {
        let known = self.longest_child(scope, parent, &tokens[..exact]);
        let node = match known {
            Some((known, common)) if common == exact => known,
            _ => {
                self.remove_child(row[0]);
                self.nodes.write(row, tokens, position);
                self.insert_child(row[0], scope, parent, None, exact);
                row[0]
            }
        };
        let all = self.nodes.tokens(node) == tokens && exact == tokens.len();
        all.then_some(node)
    }

    /// Whether a node has exactly these tokens, and stands in the virtual index of this namespace
    /// or may be entered there.
    pub(crate) fn holds(&self, anchor: BlockId, scope: ScopeId, tokens: &[u32]) -> bool {
        self.nodes.tokens(anchor) == tokens && self.is_enterable(anchor, scope)
    }

    /// Enters a node that holds the tokens of `entry` by its content, if it is not.
    pub(crate) fn ensure_content(&mut self, anchor: BlockId, entry: &ContentEntry<'_>) {
        if !self.nodes.get(anchor).in_content {
            let digest = self.content_digest(entry.scope, entry.tokens);
            self.insert_content(anchor, entry.scope, digest, entry.exact);
        }
    }

    /// Takes a node out of the virtual index. Blocks that lost their last entry are appended to
    /// `forgotten`.
    pub(crate) fn forget_content(&mut self, anchor: BlockId, forgotten: &mut Vec<BlockId>) {
        self.remove_content(anchor);
        self.forget_if_void(anchor, forgotten);
    }

    /// Takes everything below a node out of the prefix tree: without it they cannot be reached.
    fn forget_children(&mut self, anchor: BlockId, forgotten: &mut Vec<BlockId>) {
        let mut heads = vec![self.nodes.get(anchor).first_child];
        self.nodes.get_mut(anchor).first_child = BlockId::NONE;
        while let Some(mut child) = heads.pop() {
            while child.is_some() {
                let node = *self.nodes.get(child);
                heads.push(node.first_child);
                self.remove_child(child);
                self.nodes.get_mut(child).first_child = BlockId::NONE;
                self.forget_if_void(child, forgotten);
                child = node.next_sibling;
            }
        }
    }

    fn forget_if_void(&mut self, anchor: BlockId, forgotten: &mut Vec<BlockId>) {
        if !self.nodes.is_member(anchor) {
            if self.nodes.get(anchor).first_child.is_some() {
                self.forget_children(anchor, forgotten);
            }
            forgotten.extend(self.nodes.row(anchor).iter().filter(|block| block.is_some()));
            self.nodes.clear(anchor);
        }
    }

    /// Checks that tables, tree and nodes agree.
    ///
    /// # Errors
    /// `Inconsistent` naming what does not.
    pub fn check(&self) -> Result<(), Error> {
        let (mut prefix, mut content, mut rolling) = (0, 0, 0);
        let mut of_scope = vec![0; self.scopes.ids().count()];
        let page = self.nodes.page_tokens();
        for block in (0..self.nodes.capacity() as u32).map(BlockId::new) {
            let (node, anchor) = (self.nodes.get(block), self.nodes.anchor(block));
            if anchor.is_some() && !self.nodes.row(anchor).contains(&block) {
                return Err(Error::inconsistent("row", "a block of it", block.index()));
            }
            if !self.nodes.is_member(block) {
                continue;
            }
            let tokens = self.nodes.tokens(block);
            let whole = tokens.len() == page;
            for (there, scope) in
                [(node.in_prefix, node.prefix_scope), (node.in_content, node.content_scope)]
            {
                of_scope[scope.0 as usize] += usize::from(there);
            }
            prefix += usize::from(node.in_prefix && usize::from(node.prefix_len) == page);
            if self.is_first_alike(block) {
                content += 1;
                rolling += usize::from(whole);
                if self.find_content(node.content_scope, tokens) != Some(block) {
                    let got = "another block";
                    return Err(Error::inconsistent("virtual index", block.index(), got));
                }
            } else if node.in_content {
                let first = self.nodes.get(node.prev_alike);
                let joined = first.in_content && first.next_alike == block;
                if !joined || !self.is_content(node.prev_alike, node.content_scope, tokens) {
                    return Err(Error::inconsistent("list of alike", block.index(), "others"));
                }
            }
            if let (true, Parent::Block(parent)) = (node.in_prefix, node.parent)
                && !self.nodes.get(parent).in_prefix
            {
                return Err(Error::inconsistent("prefix tree", "a parent", block.index()));
            }
            for &member in self.nodes.row(block).iter().filter(|block| block.is_some()) {
                if self.nodes.anchor(member) != block {
                    return Err(Error::inconsistent("anchor", block.index(), member.index()));
                }
            }
        }
        for (scope, &least) in self.scopes.ids().zip(&of_scope) {
            if self.scopes.holders(scope) < least {
                return Err(Error::inconsistent("namespace", least, self.scopes.holders(scope)));
            }
        }
        for (what, want, got) in [
            ("prefix table", prefix, self.prefix.len()),
            ("virtual table", content, self.content.len()),
            ("rolling table", rolling, self.rolling.len()),
        ] {
            if want != got {
                return Err(Error::inconsistent(what, want, got));
            }
        }
        Ok(())
    }

    /// Tokens that a node has.
    pub(crate) fn known_tokens(&self, anchor: BlockId) -> usize {
        if self.is_member(anchor) { self.nodes.tokens(anchor).len() } else { 0 }
    }

    pub(crate) fn in_prefix(&self, anchor: BlockId) -> bool {
        self.nodes.get(anchor).in_prefix
    }

    /// The digest of a block after `parent`.
    #[must_use]
    pub fn hash(&self, parent: Digest, tokens: &[u32]) -> Digest {
        self.hasher.chain(parent, tokens)
    }

    /// Clears a node that was withdrawn and whose content another block stands for.
    pub(crate) fn release_void(&mut self, anchor: BlockId) {
        if self.nodes.anchor(anchor).is_some() {
            self.nodes.clear(anchor);
        }
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
        let anchor = self.nodes.anchor(block);
        if !anchor.is_some() {
            return;
        }
        if anchor != block {
            self.nodes.detach(block);
            return;
        }
        self.withdraw(anchor);
        self.forget_if_void(anchor, forgotten);
    }
}
