//! Identifiers as newtypes over `u32`, so that a block can never be passed for a group.

use serde::{Deserialize, Serialize};

/// One block of one head group, numbered over the whole arena and independent of its size.
///
/// Not the number that crosses the border: tables carry arena page numbers, see
/// [`Pool::page`](crate::pool::Pool::page).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct BlockId(u32);

impl BlockId {
    /// No block.
    pub const NONE: BlockId = BlockId(u32::MAX);

    /// The block at an index of the arena's block arrays.
    #[must_use]
    pub fn new(index: u32) -> BlockId {
        BlockId(index)
    }

    /// The index of this block in the arena's block arrays.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// Whether this names a block at all.
    #[must_use]
    pub fn is_some(self) -> bool {
        self != BlockId::NONE
    }
}

/// One head group: all (layer, KV head) pairs of one retention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(transparent)]
pub struct GroupId(pub u8);

impl GroupId {
    /// The index of this group in per-group arrays.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A namespace that has a quota, in all its RoPE regimes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct AccountId(pub u16);

impl AccountId {
    /// The index of this account in per-account arrays.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// One pair of namespace and RoPE regime: nothing is ever matched across two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct ScopeId(pub u32);
