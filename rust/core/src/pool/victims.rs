//! Which cached block goes first where room is wanted.

use crate::ids::{BlockId, GroupId};

/// Where a cached block stands in its group: priority, worth, and the turn in which it entered. Of
/// two blocks the one with the smaller rank goes first.
pub(super) type Rank = (u8, u64, u64);

/// The order in which cached blocks of each group are given up.
///
/// The pool says which blocks are cached: findable, and held by nobody. An order says which of them
/// goes next, and nothing else: it never holds a block.
pub(super) trait Victims {
    /// A block of a group is cached from now on; says where it stands.
    fn enter(&mut self, group: GroupId, block: BlockId) -> Rank;

    /// A block of a group is cached no longer: it is held again, or its content goes.
    fn leave(&mut self, group: GroupId, block: BlockId);

    /// The same of a row of blocks, of which the last enters first: it goes before those that it
    /// comes after.
    fn enter_row(&mut self, group: GroupId, row: &[BlockId]) {
        for &block in row.iter().rev() {
            self.enter(group, block);
        }
    }

    /// The blocks of a row are cached no longer.
    fn leave_row(&mut self, group: GroupId, row: &[BlockId]) {
        for &block in row {
            self.leave(group, block);
        }
    }

    /// A block of a group, which is cached, is about to be given up for another.
    fn give_up(&mut self, group: GroupId, block: BlockId);

    /// What was known of a block is void: its content is gone.
    fn forget(&mut self, block: BlockId);

    /// A block that is held has content again that was cached before and given up: counts as a use.
    fn recall(&mut self, block: BlockId);

    /// The cached block of a group that goes next.
    fn next(&self, group: GroupId) -> Option<BlockId>;

    /// The cached block of a group that goes next because it is past its time.
    fn past(&self, group: GroupId) -> Option<BlockId>;

    /// Takes note of what is known of a block, cached or not; says where a cached one stands now.
    fn advise(&mut self, group: GroupId, block: BlockId, advice: Advice) -> Option<Rank>;

    /// Notes what time it is, in the unit of [`Advice::until`]; says of which cached blocks that
    /// changes where they stand, and where that is now.
    fn set_time(&mut self, now: u64) -> Vec<(GroupId, BlockId, Rank)>;

    /// The cached blocks of a group and where they stand, the next to go first.
    fn in_order(&self, group: GroupId) -> Vec<(Rank, BlockId)>;
}

/// What is known of a block beside that it is cached; an order may make use of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advice {
    /// A block goes before those of a higher priority.
    pub priority: u8,
    /// What it costs to have the block again, in any unit that is the same for all.
    pub cost: u32,
    /// The time up to which this holds.
    pub until: u64,
    /// What the block is from then on.
    pub past: Past,
    /// What its user expects.
    pub hint: Hint,
}

/// What a block is once it is past its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Past {
    /// It goes before those that last longer.
    #[default]
    First,
    /// It has no priority any more, and goes as others do.
    Plain,
}

/// What the user of a block expects of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hint {
    /// Nothing.
    #[default]
    None,
    /// It is read again soon: this counts as a use.
    Soon,
    /// It is not read again.
    Done,
}

impl Default for Advice {
    fn default() -> Advice {
        Advice { priority: 0, cost: 1, until: u64::MAX, past: Past::First, hint: Hint::None }
    }
}

/// The orders that there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// The block that was used longest ago.
    #[default]
    Lru,
    /// What is past its time, then by priority, then what is cheap to have again and was used once,
    /// see [`CostAware`](super::cost_aware::CostAware).
    CostAware,
    /// What was used once, in order of arrival, then what was used again, see
    /// [`S3Fifo`](super::s3_fifo::S3Fifo).
    S3Fifo,
    /// The block that was used least often, see [`Lfu`](super::lfu::Lfu).
    Lfu,
}

impl Eviction {
    /// Whether it counts for a block that it was cached before and had to go.
    pub(crate) fn recalls(self) -> bool {
        matches!(self, Eviction::CostAware | Eviction::S3Fifo)
    }
}
