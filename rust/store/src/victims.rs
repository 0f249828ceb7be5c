//! Which shards go first where room is wanted.

use crate::header::ShardHeader;
use crate::identity::ShardName;

/// A shard that may be evicted: whole, and named by no document.
#[derive(Clone, Copy, Debug)]
pub struct Resident<'a> {
    /// Its name.
    pub name: &'a ShardName,
    /// What it says of itself.
    pub header: &'a ShardHeader,
    /// Bytes of its file.
    pub bytes: u64,
    /// Milliseconds since 1970 when it was last written or read.
    pub used: u64,
}

/// An order of eviction. What has expired goes before anything else, whatever the order says.
pub trait Victims: Send + Sync {
    /// Puts those in front that are to go first.
    fn order(&self, residents: &mut [Resident<'_>], now: u64);
}

/// Least recently used first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lru;

impl Victims for Lru {
    fn order(&self, residents: &mut [Resident<'_>], _now: u64) {
        residents.sort_by(|a, b| (a.used, a.name).cmp(&(b.used, b.name)));
    }
}
