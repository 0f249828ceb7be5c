//! Who owns which block: one arena, a pool per head group, guards that return what they hold.
//!
//! ```text
//!   free --allocate--> WritableBlocks --share--> SharedBlocks --drop--> cached (indexed) or free
//!    ^                      | drop                                          |
//!    +----------------------+<-------------------- evicted -----------------+
//! ```

mod arena;
mod block;
mod blocks;
mod check;
mod cost_aware;
mod cost_order;
mod freed;
mod hold;
mod lfu;
mod likelihood;
mod lru;
mod order;
mod pins;
mod quotas;
mod reclaim;
mod release;
mod s3_fifo;
mod slab;
mod states;
mod store;
mod victims;

pub use block::{SharedBlocks, WritableBlocks};
pub use blocks::Pool;
pub use cost_order::CostOrder;
pub use states::{BlockGroup, BlockState, Evict, GroupCounts, GroupKind};
pub use store::{Store, Stored};
pub use victims::{Advice, Eviction, Hint, Past};
