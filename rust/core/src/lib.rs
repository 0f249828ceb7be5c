//! Decisions over a KV cache whose pages are shared, moved and reused by content.
//!
//! A prompt's tokens come in, flat arrays of blocks, slots and copies go out; nothing here touches
//! an element of K or V. A request meets `cache`, which asks `content` what is known, `plan` what
//! to do with it and `pool` where it goes; `ops` is the contract with those who then compute.
#![forbid(unsafe_code)]

pub mod cache;
pub mod content;
pub mod error;
pub mod heads;
pub mod ids;
pub mod ops;
pub mod plan;
pub mod pool;
mod reserve;
pub mod scheduler;
pub mod shape;
pub mod tier;
pub mod virtual_pages;

pub use cache::{
    Admission, CacheConfig, CacheRoom, CacheStats, Counters, DecodeRows, EntryMoves, GroupStats,
    KvCache, MarkedSegment, Mode, Quota, Request, Reuse, StepHead, StepRefused, StepRows,
};
pub use content::{FrozenSegment, HashKind, MissReason};
pub use error::{Error, ErrorKind};
pub use heads::{HeadClass, HeadClassMap, HeadGroups, LocalWindow, RankedBy};
pub use ids::{BlockId, GroupId};
pub use plan::{Outcome, PlanSpan, ReusePlan, SegmentSource};
pub use pool::{Advice, Eviction, Hint, Past};
pub use shape::{KvDtype, KvShape};
