//! Exact prefixes: a table of full blocks and, below each block, the list of what followed it.
//!
//! Whole blocks are found by chained digest. Where the next block is not cached whole, the list
//! of children gives the longest common head, so a prefix may end inside a block.

use crate::ids::{BlockId, KeyId};

use super::hash::Digest;
use super::index::Index;
use super::nodes::{Parent, common_head};

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
    pub(crate) partial: Option<(BlockId, usize)>,
}

impl Index {
    /// Finds the longest cached prefix of `tokens`; appends its whole blocks to `out`.
    pub(crate) fn match_prefix(
        &self,
        key: KeyId,
        tokens: &[u32],
        out: &mut Vec<BlockId>,
    ) -> PrefixMatch {
        let page = self.nodes.page_tokens();
        let (mut parent, mut digest) = (Parent::Root, self.keys.key(key).prefix);
        let mut matched = 0;
        for tokens in tokens.chunks_exact(page) {
            let next = self.hasher.chain(digest, tokens);
            let Some(block) = self.find_child(next.low(), key, parent, tokens) else { break };
            out.push(block);
            (parent, digest) = (Parent::Block(block), next);
            matched += page;
        }
        let partial = self.longest_child(key, parent, &tokens[matched..]);
        PrefixMatch { parent, digest, partial }
    }

    /// The blocks of a chain whose digests are known, up to the first that is not cached.
    pub fn match_digests(
        &self,
        namespace: &str,
        digests: &[Digest],
        tokens: &[u32],
        out: &mut Vec<BlockId>,
    ) {
        let Some(key) = self.keys.get(namespace, 0) else { return };
        let mut parent = Parent::Root;
        for (digest, tokens) in digests.iter().zip(tokens.chunks_exact(self.nodes.page_tokens())) {
            let Some(block) = self.find_child(digest.low(), key, parent, tokens) else { return };
            out.push(block);
            parent = Parent::Block(block);
        }
    }

    /// The full block with these tokens below `parent`. Digest, parent and tokens must all agree.
    pub(super) fn find_child(
        &self,
        digest: u64,
        key: KeyId,
        parent: Parent,
        tokens: &[u32],
    ) -> Option<BlockId> {
        self.prefix.find(digest, |block| {
            let node = self.nodes.get(block);
            node.parent == parent && node.prefix_ns == key && self.nodes.tokens(block) == tokens
        })
    }

    fn first_child(&self, key: KeyId, parent: Parent) -> BlockId {
        match parent {
            Parent::Root => self.keys.key(key).first_child,
            Parent::Block(block) => self.nodes.get(block).first_child,
        }
    }

    pub(super) fn longest_child(
        &self,
        key: KeyId,
        parent: Parent,
        tokens: &[u32],
    ) -> Option<(BlockId, usize)> {
        let mut best: Option<(BlockId, usize)> = None;
        let mut child = self.first_child(key, parent);
        for _ in 0..CHILDREN {
            if !child.is_some() || best.is_some_and(|(_, n)| n == tokens.len()) {
                break;
            }
            let reach = usize::from(self.nodes.get(child).prefix_len);
            let common = common_head(&self.nodes.tokens(child)[..reach], tokens);
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
        block: BlockId,
        key: KeyId,
        parent: Parent,
        digest: Option<Digest>,
        prefix_len: usize,
    ) {
        let head = self.first_child(key, parent);
        if head.is_some() {
            self.nodes.get_mut(head).prev_sibling = block;
        }
        let node = self.nodes.get_mut(block);
        node.in_prefix = true;
        node.prefix_ns = key;
        node.parent = parent;
        node.prefix_len = prefix_len as u16;
        node.prev_sibling = BlockId::NONE;
        node.next_sibling = head;
        if let Some(digest) = digest {
            node.prefix_key = digest.low();
            self.prefix.insert(digest.low(), block);
        }
        self.set_first_child(key, parent, block);
    }

    fn set_first_child(&mut self, key: KeyId, parent: Parent, child: BlockId) {
        match parent {
            Parent::Root => self.keys.key_mut(key).first_child = child,
            Parent::Block(block) => self.nodes.get_mut(block).first_child = child,
        }
    }

    /// Takes a node out of the prefix tree. Its children stay behind; see `forget_children`.
    pub(super) fn remove_child(&mut self, block: BlockId) {
        let node = *self.nodes.get(block);
        if !node.in_prefix {
            return;
        }
        if usize::from(node.prefix_len) == self.nodes.page_tokens() {
            self.prefix.remove(node.prefix_key, block);
        }
        if node.prev_sibling.is_some() {
            self.nodes.get_mut(node.prev_sibling).next_sibling = node.next_sibling;
        } else {
            self.set_first_child(node.prefix_ns, node.parent, node.next_sibling);
        }
        if node.next_sibling.is_some() {
            self.nodes.get_mut(node.next_sibling).prev_sibling = node.prev_sibling;
        }
        let node = self.nodes.get_mut(block);
        node.in_prefix = false;
        node.prefix_len = 0;
    }
}
