//! Which node a block of a document is, found by all of its text.

use crate::ids::ScopeId;

use super::frozen::BlockText;
use super::hash::Digest;
use super::ids::ContentId;
use super::index::Index;

impl Index {
    /// The nodes of an exact text from its first token on, block by block, the incomplete last one
    /// included; fewer where they are no longer cached.
    pub(crate) fn exact_chain(&self, scope: ScopeId, tokens: &[u32]) -> Vec<ContentId> {
        let mut blocks = Vec::with_capacity(tokens.len() / self.nodes.page_tokens() + 1);
        let (_, partial) = self.walk_prefix(scope, tokens, &mut blocks);
        blocks.extend(partial.map(|(block, _)| block));
        blocks
    }

    /// The node that will stand for a block of an exact text once it is entered, if it is there:
    /// `node` of the text's chain, or, where that goes on behind these tokens, one of equal
    /// content.
    pub(crate) fn stands_for(
        &self,
        scope: ScopeId,
        tokens: &[u32],
        node: ContentId,
    ) -> Option<ContentId> {
        if self.places.is_whole(node) && self.holds(node, scope, tokens) {
            return Some(node);
        }
        let exact = usize::from(self.nodes.get(node).prefix_len);
        let goes_on = self.nodes.tokens(node)[..exact].starts_with(tokens);
        if goes_on { self.find_whole(scope, tokens) } else { None }
    }

    /// What a node of the virtual index is known by.
    pub(crate) fn text_of(&self, content: ContentId) -> BlockText {
        let tokens = self.nodes.tokens(content);
        let before = self.text_before(content);
        let scope = self.nodes.get(content).content_scope;
        BlockText { scope, content: tokens.into(), before, digest: self.text_digest(content) }
    }

    /// The node of a text; none if it is not cached.
    pub(crate) fn find_text(&self, text: &BlockText) -> Option<ContentId> {
        let is_it = |&block: &ContentId| self.is_text(block, text);
        // A whole block of an exact text is in the prefix tree by this digest.
        let whole = text.before.is_some() && text.content.len() == self.nodes.page_tokens();
        let found = if whole { self.prefix.find(text.digest, |block| is_it(&block)) } else { None };
        found.or_else(|| {
            let first = self.find_content(text.scope, &text.content)?;
            self.whole_alike(first).find(is_it)
        })
    }

    /// Says that a node has been entered, for a document of which it is a block and that looks for
    /// it.
    pub(crate) fn announce(&mut self, content: ContentId) {
        if !self.frozen.is_looking() || !self.nodes.get(content).in_content {
            return;
        }
        let by_content = self.nodes.links(content).content_key;
        let mut frozen = std::mem::take(&mut self.frozen);
        for digest in [self.text_digest(content), by_content] {
            frozen.entered(digest, |text| self.is_text(content, text));
        }
        self.frozen = frozen;
    }

    fn is_text(&self, content: ContentId, text: &BlockText) -> bool {
        let node = self.nodes.get(content);
        let foreign = node.in_content && node.content_scope != text.scope;
        let before = text.before.is_none() || self.text_before(content) == text.before;
        !foreign && before && self.nodes.tokens(content) == &*text.content
    }

    /// The digest of the exact text before a node.
    fn text_before(&self, content: ContentId) -> Option<Digest> {
        let node = self.nodes.get(content);
        let root = self.scopes.get(node.prefix_scope).prefix;
        node.in_prefix.then(|| self.digest_of(node.parent, root))
    }

    fn text_digest(&self, content: ContentId) -> u64 {
        let before = self.text_before(content);
        let chained = |before| self.hasher.chain(before, self.nodes.tokens(content)).low();
        before.map_or(self.nodes.links(content).content_key, chained)
    }
}
