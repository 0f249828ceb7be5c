//! Virtual pages under random calls against a naive map, with the books checked after every one.

use std::collections::{BTreeMap, HashMap, HashSet};

use kvweave_core::ErrorKind;
use kvweave_core::virtual_pages::{ClassPage, VirtualPages};
use proptest::prelude::*;

const PAGES: u32 = 12;
const BLOCK_PAGES: u32 = 3;
const PARTS: [u32; 2] = [1, 3];

#[derive(Clone, Debug)]
enum Op {
    Take(Vec<ClassPage>),
    Hold(Vec<ClassPage>),
    Release(Vec<ClassPage>, bool),
    Changes,
}

fn op() -> impl Strategy<Value = Op> {
    let pages = proptest::collection::vec((0..3u32, 0..PAGES + 1), 0..4);
    prop_oneof![
        3 => pages.clone().prop_map(Op::Take),
        2 => pages.clone().prop_map(Op::Hold),
        4 => (pages, any::<bool>()).prop_map(|(pages, keep)| Op::Release(pages, keep)),
        1 => Just(Op::Changes),
    ]
}

/// Holders of what is kept; 0: nobody's, but findable.
#[derive(Default)]
struct Model {
    holders: BTreeMap<ClassPage, u32>,
    seen: HashMap<(i32, i32), i32>,
}

fn blocks(at: &ClassPage) -> usize {
    PARTS[at.0 as usize] as usize
}

impl Model {
    fn valid(pages: &[ClassPage]) -> bool {
        let inside = |&(class, page): &ClassPage| class < 2 && (1..PAGES).contains(&page);
        pages.iter().all(inside) && pages.iter().collect::<HashSet<_>>().len() == pages.len()
    }

    fn holders(&self, at: &ClassPage) -> u32 {
        self.holders.get(at).copied().unwrap_or(0)
    }

    fn used(&self) -> usize {
        self.holders.iter().filter(|(_, count)| **count > 0).map(|(at, _)| blocks(at)).sum()
    }

    fn apply(&mut self, pages: &mut VirtualPages, op: &Op) {
        let total = pages.counts().total;
        match op {
            Op::Take(given) => {
                let needed: usize = given.iter().filter(|at| at.0 < 2).map(blocks).sum();
                let free = given.iter().all(|at| self.holders(at) == 0);
                match pages.take(given) {
                    Ok(()) => {
                        assert!(Self::valid(given) && free && self.used() + needed <= total);
                        self.holders.extend(given.iter().map(|&at| (at, 1)));
                    }
                    Err(error) if matches!(error.kind(), ErrorKind::PoolFull { .. }) => {
                        assert!(free && self.used() + needed > total, "there was room");
                    }
                    Err(_) => assert!(!Self::valid(given) || !free),
                }
            }
            Op::Hold(given) => {
                let kept = given.iter().all(|at| self.holders.contains_key(at));
                assert_eq!(pages.hold(given).is_ok(), Self::valid(given) && kept);
                if Self::valid(given) && kept {
                    given.iter().for_each(|at| *self.holders.get_mut(at).unwrap() += 1);
                }
            }
            Op::Release(given, keep) => {
                let held = given.iter().all(|at| self.holders(at) > 0);
                assert_eq!(pages.release(given, *keep).is_ok(), Self::valid(given) && held);
                if Self::valid(given) && held {
                    for at in given {
                        *self.holders.get_mut(at).unwrap() -= 1;
                        if !keep && self.holders(at) == 0 {
                            self.holders.remove(at);
                        }
                    }
                }
            }
            Op::Changes => self.follow(pages),
        }
        for [class, page] in pages.take_forgotten() {
            let gone = (class as u32, page as u32);
            // What was forgotten may have been taken anew by the same call.
            if self.holders(&gone) == 0 {
                assert!(self.holders.remove(&gone).is_some(), "{gone:?} was not kept");
            }
        }
    }

    /// Whoever replays the changes sees every page of arena memory once.
    fn follow(&mut self, pages: &mut VirtualPages) {
        let changes = pages.take_changes();
        let named: HashSet<_> = changes.iter().map(|row| (row[0], row[1])).collect();
        assert_eq!(named.len(), changes.len(), "an entry is listed once");
        self.seen.extend(changes.iter().map(|&[table, page, first]| ((table, page), first)));
        self.seen.retain(|_, first| *first != 0);
        let wanted: usize = self.holders.keys().map(blocks).sum();
        assert_eq!(self.seen.len(), wanted);
        let places: HashSet<i32> = self.seen.values().copied().collect();
        assert_eq!(places.len(), wanted, "two pages share a block");
        assert!(places.iter().all(|first| first % BLOCK_PAGES as i32 == 0 && *first > 0));
        for &(class, page) in self.holders.keys() {
            let first = [0, 1][class as usize];
            for table in first..first + PARTS[class as usize] as i32 {
                assert!(self.seen.contains_key(&(table, page as i32)));
            }
        }
    }

    fn compare(&self, pages: &VirtualPages) {
        pages.check().unwrap();
        let counts = pages.counts();
        assert_eq!(counts.held, self.used());
        let kept: usize = self.holders.keys().map(blocks).sum();
        assert_eq!(counts.held + counts.cached, kept);
        for class in 0..2 {
            for page in 1..PAGES {
                let at = (class, page);
                assert_eq!(pages.is_kept(at).unwrap(), self.holders.contains_key(&at));
                let cached = self.holders.get(&at) == Some(&0);
                let spared = if cached { blocks(&at) } else { 0 };
                let room = counts.free + counts.cached - spared;
                assert_eq!(pages.room_beside(&[at]).unwrap(), room);
                let alone = if self.holders(&at) == 1 { blocks(&at) } else { 0 };
                assert_eq!(pages.held_alone(&[at]).unwrap(), alone);
            }
        }
    }
}

proptest! {
    #[test]
    fn tables_agree_with_a_naive_map(
        ops in proptest::collection::vec(op(), 1..60), units in 2u64..14,
    ) {
        let arena = (units + 1) * u64::from(BLOCK_PAGES) + 1;
        let mut pages = VirtualPages::new(PAGES, arena, BLOCK_PAGES, &PARTS).unwrap();
        prop_assert_eq!(pages.counts().total as u64, units);
        let mut model = Model::default();
        for op in &ops {
            model.apply(&mut pages, op);
            model.compare(&pages);
        }
        model.follow(&mut pages);
    }
}

#[test]
fn what_was_kept_longest_goes_first_and_tails_before_heads() {
    let mut pages = VirtualPages::new(PAGES, 5, 1, &[1]).unwrap();
    pages.take(&[(0, 1), (0, 2)]).unwrap();
    pages.take(&[(0, 3)]).unwrap();
    pages.release(&[(0, 3)], true).unwrap();
    pages.release(&[(0, 1), (0, 2)], true).unwrap();
    pages.take(&[(0, 4), (0, 5)]).unwrap();
    assert_eq!(pages.take_forgotten(), [[0, 3]]);
    pages.take(&[(0, 6)]).unwrap();
    assert_eq!(pages.take_forgotten(), [[0, 2]]);
    pages.hold(&[(0, 1)]).unwrap();
    let error = pages.take(&[(0, 7)]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PoolFull { needed: 1, free: 0 }));
}

#[test]
fn arguments_that_can_never_be_right_are_refused() {
    assert!(VirtualPages::new(PAGES, 100, 1, &[]).is_err());
    assert!(VirtualPages::new(PAGES, 100, 1, &[1, 0]).is_err());
    assert!(VirtualPages::new(PAGES, 100, 1, &[u32::MAX, u32::MAX]).is_err());
    assert!(VirtualPages::new(1, 100, 1, &[1]).is_err());
    assert!(VirtualPages::new(u32::MAX, 100, 1, &[1]).is_err());
    assert!(VirtualPages::new(PAGES, 1, 1, &[1]).is_err());
    assert!(VirtualPages::new(PAGES, 100, 0, &[1]).is_err());
}
