//! What is known of each content: its tokens in one flat array, its place in the indexes.
//!
//! A node has a number of its own; where its KV lies is said in [`places`](super::places).

use crate::error::Error;
use crate::ids::ScopeId;
use crate::reserve::{filled, refused, zeroed};

use super::hash::Digest;
use super::ids::{ContentId, Link, Parent};

/// What a walk of the prefix tree reads of a node, and what else is small: one line of the cache,
/// so that a step of a walk costs one miss.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Node {
    /// Chained digest up to and including this block, if it stands whole in the prefix tree.
    pub(super) digest: Digest,
    pub(super) parent: Parent,
    pub(super) prefix_scope: ScopeId,
    pub(super) content_scope: ScopeId,
    pub(super) first_child: ContentId,
    pub(super) next_sibling: ContentId,
    pub(super) prev_sibling: ContentId,
    pub(super) generation: u32,
    /// Position of slot 0 at which K was rotated.
    pub(super) position: u32,
    /// Hits since the block was indexed.
    pub(super) uses: u32,
    /// Tokens stored, and how many of them an exact prefix reaches.
    pub(super) len: u16,
    pub(super) prefix_len: u16,
    pub(super) in_prefix: bool,
    pub(super) in_content: bool,
    pub(super) exact: bool,
}

const _: () = assert!(size_of::<Node>() == 64, "a node fills one line of the cache");

const VOID: Node = Node {
    digest: Digest::ZERO,
    parent: Parent::Root,
    prefix_scope: ScopeId(0),
    content_scope: ScopeId(0),
    first_child: ContentId::NONE,
    next_sibling: ContentId::NONE,
    prev_sibling: ContentId::NONE,
    generation: 0,
    position: 0,
    uses: 0,
    len: 0,
    prefix_len: 0,
    in_prefix: false,
    in_content: false,
    exact: false,
};

/// What leads to a node by its content, and from it to others of the same content or text. No walk
/// of the prefix tree reads it.
#[derive(Clone, Copy)]
pub(super) struct Links {
    pub(super) content_key: u64,
    pub(super) roll_key: u64,
    /// Other nodes of the same content, which stand in other texts. The first is in the tables.
    pub(super) next_alike: ContentId,
    pub(super) prev_alike: ContentId,
    /// The blocks before and after in the donor's text.
    pub(super) before: Link,
    pub(super) after: Link,
}

const UNLINKED: Links = Links {
    content_key: 0,
    roll_key: 0,
    next_alike: ContentId::NONE,
    prev_alike: ContentId::NONE,
    before: Link::NONE,
    after: Link::NONE,
};

/// All nodes and their tokens.
pub(super) struct Nodes {
    page_tokens: usize,
    nodes: Vec<Node>,
    links: Vec<Links>,
    tokens: Vec<u32>,
    /// Numbers from here on were never given; those that came back are in `free`.
    fresh: u32,
    free: Vec<ContentId>,
}

impl Nodes {
    pub(super) fn new(capacity: usize, page_tokens: usize) -> Result<Nodes, Error> {
        let mut free = Vec::new();
        let room = free.try_reserve_exact(capacity);
        room.map_err(|_| refused::<ContentId>("numbers of contents", capacity))?;
        Ok(Nodes {
            page_tokens,
            tokens: zeroed("tokens of blocks", capacity.saturating_mul(page_tokens))?,
            nodes: filled("contents of blocks", VOID, capacity)?,
            links: filled("links of contents", UNLINKED, capacity)?,
            fresh: 0,
            free,
        })
    }

    pub(super) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// A number for content that is new. There is one for each block of the first head group, and
    /// no content without such a block.
    pub(super) fn allocate(&mut self) -> ContentId {
        let content = self.free.pop().unwrap_or_else(|| {
            self.fresh += 1;
            ContentId::new(self.fresh - 1)
        });
        // Who took a link to the number while it was nobody's must not be led to new content.
        let node = self.get_mut(content);
        node.generation = node.generation.wrapping_add(1);
        content
    }

    pub(super) fn get(&self, content: ContentId) -> &Node {
        &self.nodes[content.index()]
    }

    pub(super) fn get_mut(&mut self, content: ContentId) -> &mut Node {
        &mut self.nodes[content.index()]
    }

    pub(super) fn links(&self, content: ContentId) -> &Links {
        &self.links[content.index()]
    }

    pub(super) fn links_mut(&mut self, content: ContentId) -> &mut Links {
        &mut self.links[content.index()]
    }

    pub(super) fn tokens(&self, content: ContentId) -> &[u32] {
        let at = content.index() * self.page_tokens;
        &self.tokens[at..at + usize::from(self.nodes[content.index()].len)]
    }

    pub(super) fn is_member(&self, content: ContentId) -> bool {
        let node = self.get(content);
        node.in_prefix || node.in_content
    }

    /// Notes what content is, of which a head may have been known. False if nothing is new.
    pub(super) fn write(&mut self, content: ContentId, tokens: &[u32], position: u32) -> bool {
        if self.is_member(content) && self.tokens(content).len() == tokens.len() {
            return false;
        }
        let at = content.index() * self.page_tokens;
        self.tokens[at..at + tokens.len()].copy_from_slice(tokens);
        let node = self.get_mut(content);
        node.len = tokens.len() as u16;
        node.position = position;
        true
    }

    /// Forgets a node and gives its number back; links to it become void.
    pub(super) fn clear(&mut self, content: ContentId) {
        let node = self.get_mut(content);
        *node = Node { generation: node.generation.wrapping_add(1), ..VOID };
        *self.links_mut(content) = UNLINKED;
        self.free.push(content);
    }

    pub(super) fn link(&self, content: ContentId) -> Link {
        Link { content, generation: self.get(content).generation }
    }

    /// The node a link leads to, if it still stands.
    pub(super) fn follow(&self, link: Link) -> Option<ContentId> {
        let content = link.content.some()?;
        (self.get(content).generation == link.generation).then_some(content)
    }

    /// All numbers that were ever given.
    pub(super) fn ids(&self) -> impl Iterator<Item = ContentId> {
        (0..self.fresh).map(ContentId::new)
    }

    /// How many numbers are in use.
    pub(super) fn len(&self) -> usize {
        self.fresh as usize - self.free.len()
    }
}

/// Length of the common head of two token spans.
pub(super) fn common_head(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

/// Length of the common tail of two token spans.
pub(super) fn common_tail(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take_while(|(x, y)| x == y).count()
}
