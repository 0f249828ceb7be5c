//! Key to blocks: a hash table whose keys are digests already, so nothing is hashed again.
//!
//! The nodes have the keys too, so the table itself has numbers alone: what a look-up reads of it
//! is small.

use hashbrown::HashTable;

use crate::error::Error;
use crate::reserve::refused;

use super::ids::ContentId;

/// Any number of blocks per 64-bit key.
pub(super) struct Table(HashTable<ContentId>);

impl Table {
    /// A table for up to `capacity` entries that never grows: growing under the lock would stall
    /// every request. It is less than half full, so that what is removed leaves gaps that can be
    /// used again, hardly ever such that have to be swept.
    pub(super) fn new(capacity: usize) -> Result<Table, Error> {
        let room = capacity.saturating_mul(2);
        let mut table = HashTable::new();
        let made = table.try_reserve(room, |_| 0);
        made.map_err(|_| refused::<ContentId>("table of contents", room))?;
        Ok(Table(table))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The first block that `accept` takes of those that may have this key: it is asked of few
    /// others.
    pub(super) fn find(&self, key: u64, accept: impl Fn(ContentId) -> bool) -> Option<ContentId> {
        self.0.find(key, |&block| accept(block)).copied()
    }

    /// Enters a block by its key. `key_of` is the key of any block that is entered: they are put in
    /// order anew where gaps that were left behind fill the table.
    pub(super) fn insert(&mut self, key: u64, block: ContentId, key_of: impl Fn(ContentId) -> u64) {
        self.0.insert_unique(key, block, |&block| key_of(block));
    }

    /// Removes one entry; true if it was there.
    pub(super) fn remove(&mut self, key: u64, block: ContentId) -> bool {
        match self.0.find_entry(key, |&entry| entry == block) {
            Ok(entry) => {
                entry.remove();
                true
            }
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key as a digest has it.
    fn key(number: u64) -> u64 {
        (number + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(31)
            .wrapping_mul(0xd6e8_feb8_6659_fd93)
    }

    #[test]
    fn a_full_table_of_which_entries_come_and_go_neither_grows_nor_is_swept() {
        const ROOM: usize = 7 << 10;
        let mut table = Table::new(ROOM).unwrap();
        let room = table.0.capacity();
        let mut keys: Vec<u64> = Vec::new();
        for number in 0..400_000u64 {
            let at = number as usize % ROOM;
            let block = ContentId::new(at as u32);
            if let Some(old) = keys.get(at) {
                assert!(table.remove(*old, block));
                keys[at] = key(number);
            } else {
                keys.push(key(number));
            }
            table.insert(keys[at], block, |_| panic!("swept after {number}"));
        }
        assert_eq!((table.len(), table.0.capacity()), (ROOM, room));
        let found = |&key: &u64| table.find(key, |block| keys[block.index()] == key).is_some();
        assert!(keys.iter().all(found));
    }

    #[test]
    fn what_is_swept_is_found_by_its_key() {
        let mut table = Table(HashTable::with_capacity(7));
        let keys: Vec<u64> = (0..500).map(key).collect();
        let block = |number: usize| ContentId::new(number as u32);
        for number in 0..keys.len() {
            table.insert(keys[number], block(number), |block| keys[block.index()]);
            if number >= 7 {
                assert!(table.remove(keys[number - 7], block(number - 7)));
                assert!(!table.remove(keys[number - 7], block(number - 7)));
            }
            for known in (number.saturating_sub(6)..=number).map(block) {
                let found = table.find(keys[known.index()], |entry| entry == known);
                assert_eq!(found, Some(known));
            }
        }
        assert!(Table::new(usize::MAX).is_err());
    }
}
