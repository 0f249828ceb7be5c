//! The states of a block, a group and a slab: plain data.

use crate::ids::{BlockId, GroupId};

/// What the pool tells an index: a block's content is about to be overwritten.
pub trait Evict {
    /// Forgets a block. Other blocks that thereby lose their last index entry are appended to
    /// `forgotten`, so that the pool frees them too.
    fn evicted(&mut self, block: BlockId, forgotten: &mut Vec<BlockId>);
}

impl Evict for () {
    fn evicted(&mut self, _block: BlockId, _forgotten: &mut Vec<BlockId>) {}
}

/// Where a block is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Its slab belongs to no group.
    Unclaimed,
    /// In its group's free list; content void.
    Free,
    /// Named by this many guards and pins.
    Held(u32),
    /// Named by nobody, content indexed, in its group's order of victims.
    Cached,
}

/// What the blocks of a group are used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// They are kept for as long as somebody reads them.
    Full,
    /// Most are given up soon after: windows of tokens move on.
    Window,
    /// Single pages that no index ever names, and of which there may be none.
    SinglePage,
}

/// The blocks of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockGroup {
    /// Pages of one block.
    pub pages: u32,
    /// What they are used for.
    pub kind: GroupKind,
}

#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) state: BlockState,
    /// Requests that may write the block; above 1 it is copied before a write. Never more than its
    /// holders, hence as wide as their number: a holder is a guard with a list of its own, so
    /// memory ends long before either count.
    pub(super) owners: u32,
    pub(super) slab: u16,
    pub(super) group: GroupId,
    pub(super) indexed: bool,
    /// Whether `pins` has it: what is not pinned is not looked up there.
    pub(super) pinned: bool,
}

impl Block {
    pub(super) const UNCLAIMED: Block = Block {
        state: BlockState::Unclaimed,
        owners: 0,
        slab: 0,
        group: GroupId(0),
        indexed: false,
        pinned: false,
    };
}

pub(super) struct Group {
    pub(super) pages: u32,
    pub(super) kind: GroupKind,
    pub(super) slab_blocks: u32,
    pub(super) free: usize,
    /// Blocks that are cached, in the order of the pool.
    pub(super) cached: usize,
    pub(super) held: usize,
    pub(super) total: usize,
}

/// Blocks of one group, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts {
    /// Blocks of the slabs that the group has claimed.
    pub total: usize,
    /// Of these: void.
    pub free: usize,
    /// Of these: named by a guard or a pin.
    pub held: usize,
    /// Of these: named by nobody, findable.
    pub cached: usize,
    /// Blocks that the group would gain from slabs that nobody has claimed.
    pub claimable: usize,
    /// Pages of one block.
    pub block_pages: u32,
}

/// A run of pages that one group has cut into blocks.
#[derive(Default)]
pub(super) struct Slab {
    pub(super) owner: Option<GroupId>,
    /// The number of its first block.
    pub(super) first: u32,
    pub(super) free: Vec<BlockId>,
    pub(super) cached: u32,
}
