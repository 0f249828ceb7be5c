//! The tier on disk: KV of text segments in files that are found by what they are of.
//!
//! A shard is one file: the KV (or packed pages) of one segment, its token ids, and all that these
//! depend on. It is written beside, synced and renamed, so it is there whole or not at all, and
//! what was acknowledged survives. Whoever reads one compares everything, down to the token ids,
//! and checks every byte.

#![forbid(unsafe_code)]

mod books;
mod checksum;
mod document;
mod error;
mod folder;
mod header;
mod identity;
mod naming;
mod read;
mod record;
mod shard;
mod store;
mod upkeep;
mod victims;

pub use books::Budget;
pub use document::Document;
pub use error::{ErrorKind, StoreError};
pub use header::{ALIGN, Part, PartEntry, SCHEMA, ShardHeader, TOKENS, Terms};
pub use identity::{Dtype, Layout, MOST_NAME_BYTES, Naming, Provenance, ShardName};
pub use read::ReadPath;
pub use shard::Shard;
pub use store::{Listed, Store, StoreOptions, Stored};
pub use upkeep::Collected;
pub use victims::{Lru, Resident, Victims};
