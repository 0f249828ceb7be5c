//! What is cached, found by content: exact prefixes, position-free segments, knowledge bases.
//!
//! A digest only says where to look. A hit is a hit when the token ids are equal and, for a
//! prefix, when the block before it is the very block that was matched before: by induction the
//! whole prefix is then equal, and a collision can never serve foreign KV.

mod accounts;
mod alike;
mod charges;
mod check;
mod departed;
mod discover;
mod frozen;
pub mod hash;
mod ids;
mod index;
mod matching;
mod miss;
mod nodes;
mod places;
mod prefix_index;
mod scopes;
mod table;
mod texts;
mod virtual_index;

pub use frozen::FrozenSegment;
pub(crate) use frozen::Removed;
pub use hash::{BlockHasher, Digest, HashKind};
pub(crate) use ids::{ContentId, DocumentBlock, Link, Parent};
pub(crate) use index::ContentEntry;
pub use index::Index;
pub(crate) use matching::{Matches, Piece};
pub use miss::MissReason;
pub(crate) use prefix_index::PrefixMatch;
