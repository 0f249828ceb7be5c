//! Room for entry tables in one array: segments of a power of two, found and given back as buddies.

use std::collections::BTreeSet;

/// Entries of the smallest segment, as a power of two.
const LEAST: u32 = 4;

/// Entries of the array at first, as a power of two.
const FIRST: u32 = 12;

/// Consecutive entries of the array, 2^`log` of them; `start` is a multiple of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) start: usize,
    log: u32,
}

impl Segment {
    /// Entries that it holds.
    pub(super) fn len(self) -> usize {
        1 << self.log
    }

    pub(super) fn end(self) -> usize {
        self.start + self.len()
    }
}

/// Which parts of the array are free. It doubles where nothing fits: what lies in it stays there.
pub(super) struct EntryRoom {
    /// Starts of free segments by the logarithm of their size.
    free: Vec<BTreeSet<usize>>,
    log: u32,
}

impl EntryRoom {
    pub(super) fn new() -> EntryRoom {
        let mut free = vec![BTreeSet::new(); FIRST as usize + 1];
        free[FIRST as usize].insert(0);
        EntryRoom { free, log: FIRST }
    }

    /// Entries of the array.
    pub(super) fn len(&self) -> usize {
        1 << self.log
    }

    /// The smallest segment that holds so many entries.
    pub(super) fn take(&mut self, entries: usize) -> Segment {
        let log = entries.next_power_of_two().trailing_zeros().max(LEAST);
        let found = loop {
            let found = (log..=self.log).find(|&log| !self.free[log as usize].is_empty());
            match found {
                Some(found) => break found,
                None => self.double(),
            }
        };
        let start = self.free[found as usize].pop_first().unwrap_or(0);
        for half in log..found {
            self.free[half as usize].insert(start + (1 << half));
        }
        Segment { start, log }
    }

    /// Gives a segment back; with its buddy, where that is free, it becomes one of twice the size.
    pub(super) fn give_back(&mut self, segment: Segment) {
        let Segment { mut start, mut log } = segment;
        while log < self.log && self.free[log as usize].remove(&(start ^ (1 << log))) {
            start &= !(1 << log);
            log += 1;
        }
        self.free[log as usize].insert(start);
    }

    fn double(&mut self) {
        let upper = Segment { start: self.len(), log: self.log };
        self.log += 1;
        self.free.push(BTreeSet::new());
        self.give_back(upper);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::EntryRoom;

    proptest! {
        #[test]
        fn segments_never_overlap_and_all_come_back(
            steps in prop::collection::vec((any::<u8>(), 1usize..3000), 1..200),
        ) {
            let (mut room, mut held) = (EntryRoom::new(), Vec::new());
            for (which, entries) in steps {
                if which % 3 == 0 && !held.is_empty() {
                    room.give_back(held.swap_remove(usize::from(which) % held.len()));
                } else {
                    let segment = room.take(entries);
                    prop_assert!((entries..=2 * entries.max(8)).contains(&segment.len()));
                    held.push(segment);
                }
                let mut spans: Vec<_> = held.iter().map(|s| (s.start, s.end())).collect();
                spans.sort_unstable();
                prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                prop_assert!(spans.last().is_none_or(|span| span.1 <= room.len()));
                let free: usize =
                    (0..).zip(&room.free).map(|(log, starts): (u32, _)| starts.len() << log).sum();
                let taken: usize = held.iter().map(|segment| segment.len()).sum();
                prop_assert_eq!(free + taken, room.len());
            }
            held.into_iter().for_each(|segment| room.give_back(segment));
            let whole = room.log as usize;
            prop_assert_eq!(room.free[whole].len(), 1);
            prop_assert!(room.free[..whole].iter().all(|starts| starts.is_empty()));
        }
    }
}
