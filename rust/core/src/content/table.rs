//! Key to blocks: a hash table whose keys are digests already, so nothing is hashed again.

use hashbrown::HashTable;

use crate::error::Error;
use crate::reserve::refused;

use super::ids::ContentId;

/// Any number of blocks per 64-bit key.
pub(super) struct Table(HashTable<(u64, ContentId)>);

impl Table {
    /// A table that never grows: growing under the lock would stall every request.
    pub(super) fn new(capacity: usize) -> Result<Table, Error> {
        let mut table = HashTable::new();
        let room = table.try_reserve(capacity, |&(key, _)| key);
        room.map_err(|_| refused::<(u64, ContentId)>("table of contents", capacity))?;
        Ok(Table(table))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The first block of this key that `accept` takes.
    pub(super) fn find(&self, key: u64, accept: impl Fn(ContentId) -> bool) -> Option<ContentId> {
        self.0.find(key, |&(k, block)| k == key && accept(block)).map(|&(_, block)| block)
    }

    pub(super) fn insert(&mut self, key: u64, block: ContentId) {
        self.0.insert_unique(key, (key, block), |&(k, _)| k);
    }

    /// Removes one entry; true if it was there.
    pub(super) fn remove(&mut self, key: u64, block: ContentId) -> bool {
        match self.0.find_entry(key, |&entry| entry == (key, block)) {
            Ok(entry) => {
                entry.remove();
                true
            }
            Err(_) => false,
        }
    }
}
