//! What is known of each block's content: its tokens in one flat array, its place in the indexes.
//!
//! A node is numbered by the block of the first head group ("anchor"), and goes when that goes. A
//! block of another group can go before: window groups let go of what no row sees any more.

use crate::error::Error;
use crate::heads::LocalWindow;
use crate::ids::{BlockId, ScopeId};
use crate::reserve::{filled, zeroed};

use super::hash::Digest;

/// What precedes a block in the prefix tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parent {
    /// Nothing: the block starts a prompt.
    Root,
    /// This block.
    Block(BlockId),
}

/// A reference to a node that outlives it: void once the generation has moved on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) block: BlockId,
    pub(crate) generation: u32,
}

impl Link {
    pub(super) const NONE: Link = Link { block: BlockId::NONE, generation: 0 };
}

#[derive(Clone, Copy)]
pub(super) struct Node {
    /// Chained digest up to and including this block, if it stands whole in the prefix tree.
    pub(super) digest: Digest,
    pub(super) content_key: u64,
    pub(super) roll_key: u64,
    pub(super) parent: Parent,
    pub(super) prefix_scope: ScopeId,
    pub(super) content_scope: ScopeId,
    pub(super) first_child: BlockId,
    pub(super) next_sibling: BlockId,
    pub(super) prev_sibling: BlockId,
    /// Other nodes of the same content, which stand in other texts. The first is in the tables.
    pub(super) next_alike: BlockId,
    pub(super) prev_alike: BlockId,
    /// The blocks before and after in the donor's text.
    pub(super) before: Link,
    pub(super) after: Link,
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

const VOID: Node = Node {
    digest: Digest::ZERO,
    content_key: 0,
    roll_key: 0,
    parent: Parent::Root,
    prefix_scope: ScopeId(0),
    content_scope: ScopeId(0),
    first_child: BlockId::NONE,
    next_sibling: BlockId::NONE,
    prev_sibling: BlockId::NONE,
    next_alike: BlockId::NONE,
    prev_alike: BlockId::NONE,
    before: Link::NONE,
    after: Link::NONE,
    generation: 0,
    position: 0,
    uses: 0,
    len: 0,
    prefix_len: 0,
    in_prefix: false,
    in_content: false,
    exact: false,
};

/// All nodes, their tokens and their blocks in every group.
pub(super) struct Nodes {
    page_tokens: usize,
    /// What each group keeps of a sequence; `None` for all of it.
    windows: Vec<Option<LocalWindow>>,
    /// Blocks that nobody else may hold yet, by number; empty if every group keeps all.
    withheld: Vec<bool>,
    nodes: Vec<Node>,
    tokens: Vec<u32>,
    rows: Vec<BlockId>,
    anchors: Vec<BlockId>,
}

impl Nodes {
    pub(super) fn new(
        capacity: usize,
        page_tokens: usize,
        windows: Vec<Option<LocalWindow>>,
    ) -> Result<Nodes, Error> {
        let windowed = windows.iter().any(Option::is_some);
        let (tokens, rows) =
            (capacity.saturating_mul(page_tokens), capacity.saturating_mul(windows.len()));
        Ok(Nodes {
            page_tokens,
            tokens: zeroed("tokens of blocks", tokens)?,
            withheld: filled("withheld blocks", false, if windowed { capacity } else { 0 })?,
            nodes: filled("contents of blocks", VOID, capacity)?,
            rows: filled("rows of blocks", BlockId::NONE, rows)?,
            anchors: filled("rows of blocks", BlockId::NONE, capacity)?,
            windows,
        })
    }

    pub(super) fn windows(&self) -> &[Option<LocalWindow>] {
        &self.windows
    }

    pub(super) fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    pub(super) fn get(&self, block: BlockId) -> &Node {
        &self.nodes[block.index()]
    }

    pub(super) fn get_mut(&mut self, block: BlockId) -> &mut Node {
        &mut self.nodes[block.index()]
    }

    pub(super) fn tokens(&self, block: BlockId) -> &[u32] {
        let at = block.index() * self.page_tokens;
        &self.tokens[at..at + usize::from(self.nodes[block.index()].len)]
    }

    /// The blocks of a node in every group; none where a window group's is gone.
    pub(super) fn row(&self, anchor: BlockId) -> &[BlockId] {
        let groups = self.windows.len();
        &self.rows[anchor.index() * groups..][..groups]
    }

    fn row_mut(&mut self, anchor: BlockId) -> &mut [BlockId] {
        let groups = self.windows.len();
        &mut self.rows[anchor.index() * groups..][..groups]
    }

    /// Whether a node's block of a group is there for others to hold.
    pub(super) fn offers(&self, anchor: BlockId, group: usize) -> bool {
        let block = self.row(anchor)[group];
        block.is_some() && !self.is_withheld(block)
    }

    /// Whether a node's blocks of all groups are there for others to hold.
    pub(super) fn is_whole(&self, anchor: BlockId) -> bool {
        let all = 0..self.windows.len();
        self.withheld.is_empty() || all.into_iter().all(|group| self.offers(anchor, group))
    }

    fn is_withheld(&self, block: BlockId) -> bool {
        self.withheld.get(block.index()).is_some_and(|&withheld| withheld)
    }

    pub(super) fn withhold(&mut self, block: BlockId, withheld: bool) {
        self.withheld[block.index()] = withheld;
    }

    /// Puts blocks that no node names in the places of a node that are empty.
    pub(super) fn fill(&mut self, anchor: BlockId, row: &[BlockId]) {
        for (group, &block) in row.iter().enumerate() {
            let empty = !self.row(anchor)[group].is_some();
            if empty && block.is_some() && !self.anchor(block).is_some() {
                self.row_mut(anchor)[group] = block;
                self.anchors[block.index()] = anchor;
            }
        }
    }

    /// Takes a block that is not the anchor out of its node.
    pub(super) fn detach(&mut self, block: BlockId) {
        let anchor = self.anchor(block);
        self.anchors[block.index()] = BlockId::NONE;
        for entry in self.row_mut(anchor) {
            if *entry == block {
                *entry = BlockId::NONE;
            }
        }
    }

    /// The node that a block of any group belongs to.
    pub(super) fn anchor(&self, block: BlockId) -> BlockId {
        self.anchors[block.index()]
    }

    pub(super) fn is_member(&self, anchor: BlockId) -> bool {
        let node = self.get(anchor);
        node.in_prefix || node.in_content
    }

    /// Notes the content of a row of blocks. What it contained before may only have been a head
    /// of the same tokens; blocks that the node has already stay.
    pub(super) fn write(&mut self, row: &[BlockId], tokens: &[u32], position: u32) {
        let anchor = row[0];
        if self.is_member(anchor) && self.tokens(anchor).len() == tokens.len() {
            return;
        }
        let at = anchor.index() * self.page_tokens;
        self.tokens[at..at + tokens.len()].copy_from_slice(tokens);
        // A block of a window group may have gone to another node, which had lost its own.
        self.fill(anchor, row);
        let node = self.get_mut(anchor);
        node.len = tokens.len() as u16;
        node.position = position;
    }

    /// Forgets a node; links to it become void.
    pub(super) fn clear(&mut self, anchor: BlockId) {
        for group in 0..self.windows.len() {
            let block = std::mem::replace(&mut self.row_mut(anchor)[group], BlockId::NONE);
            if block.is_some() {
                self.anchors[block.index()] = BlockId::NONE;
            }
        }
        let node = self.get_mut(anchor);
        *node = Node { generation: node.generation.wrapping_add(1), ..VOID };
    }

    pub(super) fn link(&self, anchor: BlockId) -> Link {
        Link { block: anchor, generation: self.get(anchor).generation }
    }

    /// The node a link leads to, if it still stands.
    pub(super) fn follow(&self, link: Link) -> Option<BlockId> {
        let stands = link.block.is_some() && self.get(link.block).generation == link.generation;
        stands.then_some(link.block)
    }

    pub(super) fn capacity(&self) -> usize {
        self.nodes.len()
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
