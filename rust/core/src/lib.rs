//! Decisions over a KV cache whose pages are shared, moved and reused by content.
//!
//! A prompt's tokens come in, flat arrays of blocks, slots and copies go out; nothing here touches
//! an element of K or V. Modules stand in the order in which a request meets them.
#![forbid(unsafe_code)]

pub mod error;
pub mod heads;
pub mod ids;
pub mod ops;
pub mod pool;
pub mod shape;

pub use error::{Error, ErrorKind};
pub use heads::{HeadClass, HeadClassMap, HeadGroups};
pub use ids::{BlockId, GroupId};
pub use shape::{KvDtype, KvShape};
