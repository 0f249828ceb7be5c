//! Random pool operations against a naive map, with law 1 checked after every one of them.

use std::collections::HashMap;
use std::sync::Arc;

use kvweave_core::pool::{BlockGroup, GroupKind, Pool, SharedBlocks, Store, WritableBlocks};
use kvweave_core::{BlockId, ErrorKind, GroupId};
use proptest::prelude::*;

const GROUP_PAGES: [u32; 3] = [3, 2, 1];
/// Blocks that last, blocks that pass, and single_page pages, which no index names.
const KINDS: [GroupKind; 3] = [GroupKind::Full, GroupKind::Window, GroupKind::SinglePage];

#[derive(Clone, Debug)]
enum Op {
    Allocate([usize; 3]),
    Share(usize),
    ShareHalf(usize),
    Claim(usize),
    Fork(usize),
    Clone(usize),
    Index(usize),
    DropWritable(usize),
    DropShared(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let which = 0usize..64;
    prop_oneof![
        4 => [0usize..9, 0..9, 0..9].prop_map(Op::Allocate),
        2 => which.clone().prop_map(Op::Share),
        1 => which.clone().prop_map(Op::ShareHalf),
        1 => which.clone().prop_map(Op::Claim),
        1 => which.clone().prop_map(Op::Fork),
        1 => which.clone().prop_map(Op::Clone),
        2 => which.clone().prop_map(Op::Index),
        2 => which.clone().prop_map(Op::DropWritable),
        3 => which.prop_map(Op::DropShared),
    ]
}

#[derive(Default)]
struct Model {
    writable: Vec<WritableBlocks<()>>,
    shared: Vec<SharedBlocks<()>>,
}

impl Model {
    fn take<T>(from: &mut Vec<T>, which: usize) -> Option<T> {
        (!from.is_empty()).then(|| from.swap_remove(which % from.len()))
    }

    fn apply(&mut self, store: &Arc<Store<()>>, op: &Op) {
        match *op {
            Op::Allocate(needs) => match WritableBlocks::allocate(store, &needs) {
                Ok(blocks) => {
                    assert_eq!(blocks.blocks().len(), needs.iter().sum::<usize>());
                    self.writable.push(blocks);
                }
                Err(error) => assert!(
                    matches!(error.kind(), ErrorKind::PoolFull { needed, free } if free < needed)
                ),
            },
            Op::Share(i) => {
                self.shared.extend(Self::take(&mut self.writable, i).map(WritableBlocks::share));
            }
            Op::ShareHalf(i) => {
                if let Some(mut blocks) = Self::take(&mut self.writable, i) {
                    let half = blocks.blocks()[..blocks.blocks().len() / 2].to_vec();
                    self.shared.push(blocks.share_some(&half));
                    self.writable.push(blocks);
                }
            }
            Op::Claim(i) => {
                if let Some(blocks) = Self::take(&mut self.shared, i) {
                    match blocks.claim() {
                        Ok(blocks) => self.writable.push(blocks),
                        Err(blocks) => self.shared.push(blocks),
                    }
                }
            }
            Op::Fork(i) => {
                if let Some(blocks) = Self::take(&mut self.writable, i) {
                    self.writable.push(blocks.fork());
                    self.writable.push(blocks);
                }
            }
            Op::Clone(i) => {
                if let Some(blocks) = Self::take(&mut self.shared, i) {
                    self.shared.push(blocks.clone());
                    self.shared.push(blocks);
                }
            }
            Op::Index(i) => {
                if let Some(blocks) = Self::take(&mut self.shared, i) {
                    let mut stored = store.lock();
                    let named = |block: &&BlockId| block.index() < stored.pool.capacity();
                    let named: Vec<BlockId> =
                        blocks.blocks().iter().filter(named).copied().collect();
                    stored.pool.mark_indexed(&named);
                    drop(stored);
                    self.shared.push(blocks);
                }
            }
            Op::DropWritable(i) => drop(Self::take(&mut self.writable, i)),
            Op::DropShared(i) => drop(Self::take(&mut self.shared, i)),
        }
    }

    /// What the guards name must be what the pool says is held, on pages of its own.
    fn compare(&self, store: &Arc<Store<()>>) {
        let mut holders: HashMap<BlockId, (u32, u32)> = HashMap::new();
        for block in self.writable.iter().flat_map(|blocks| blocks.blocks()) {
            let count = holders.entry(*block).or_default();
            *count = (count.0 + 1, count.1 + 1);
        }
        for block in self.shared.iter().flat_map(|blocks| blocks.blocks()) {
            holders.entry(*block).or_default().0 += 1;
        }
        let stored = store.lock();
        stored.pool.check().unwrap();
        let mut pages = HashMap::new();
        assert!(stored.pool.counts(GroupId(2)).cached == 0, "a single_page page is never cached");
        let held: usize = (0..3).map(|group| stored.pool.counts(GroupId(group)).held).sum();
        assert_eq!(held, holders.len());
        for (&block, &(references, owners)) in &holders {
            assert_eq!(stored.pool.references(block), references);
            assert_eq!(stored.pool.owners(block), owners);
        }
        for &block in holders.keys() {
            let first = stored.pool.page(block);
            assert!(first >= 3, "a block lies in the null block");
            for page in first..first + GROUP_PAGES[stored.pool.group(block).index()] as i32 {
                assert_eq!(pages.insert(page, block), None, "two blocks on one page");
            }
        }
    }
}

fn run(ops: &[Op], pages: u64, slab: Option<u32>) {
    let group = |(pages, kind)| BlockGroup { pages, kind };
    let groups: Vec<BlockGroup> = GROUP_PAGES.into_iter().zip(KINDS).map(group).collect();
    let pool = Pool::of_groups(pages, slab, &groups).unwrap();
    let store = Arc::new(Store::new(pool, ()));
    let mut model = Model::default();
    for op in ops {
        model.apply(&store, op);
        model.compare(&store);
    }
    drop(model);
    Model::default().compare(&store);
}

proptest! {
    #[test]
    fn guards_and_pool_agree(
        ops in proptest::collection::vec(op(), 1..80), pages in 40u64..200,
        slab in proptest::option::of(3u32..12),
    ) {
        run(&ops, pages, slab);
    }
}

#[test]
fn blocks_of_all_groups_lie_on_pages_of_their_own() {
    let store = Arc::new(Store::new(Pool::new(200, Some(7), &GROUP_PAGES).unwrap(), ()));
    let blocks = WritableBlocks::allocate(&store, &[12; 3]).unwrap();
    let stored = store.lock();
    let mut taken = std::collections::HashSet::new();
    for (group, pages) in blocks.blocks().chunks_exact(12).zip(GROUP_PAGES) {
        for block in group {
            let first = stored.pool.page(*block);
            for page in first..first + pages as i32 {
                assert!((3..200).contains(&page), "page {page} is not the pool's to give");
                assert!(taken.insert(page), "page {page} given twice");
            }
        }
    }
}

#[test]
fn slabs_cached_by_some_groups_serve_another() {
    // Slabs of 6 pages hold 2, 3 and 6 blocks: 8 rows take 4 + 3 + 2 slabs, which is all.
    let store = Arc::new(Store::new(Pool::new(3 + 6 * 9, Some(6), &GROUP_PAGES).unwrap(), ()));
    let totals = || [0, 1, 2].map(|group| store.lock().pool.counts(GroupId(group)).total);
    let mut rows = WritableBlocks::allocate(&store, &[8; 3]).unwrap();
    assert_eq!(totals(), [8, 9, 12]);
    let others: Vec<BlockId> = rows.blocks()[8..].to_vec();
    store.lock().pool.mark_indexed(&others);
    drop(rows.share_some(&others));
    assert_eq!(store.lock().pool.counts(GroupId(1)).cached, 8);
    // Group 0 keeps its 8 blocks held; 4 more rows need 2 + 2 + 1 of the other 5 slabs.
    let error = WritableBlocks::allocate(&store, &[5; 3]).err().unwrap();
    assert!(matches!(error.kind(), ErrorKind::PoolFull { needed: 5, .. }));
    assert_eq!(totals(), [8, 9, 12]);
    let more = WritableBlocks::allocate(&store, &[4; 3]).unwrap();
    assert_eq!(totals(), [12, 6, 6]);
    store.lock().pool.check().unwrap();
    drop((rows, more));
    store.lock().pool.check().unwrap();
}

/// The whole of an arena can go from one use to another as soon as it is free.
#[test]
fn freed_blocks_serve_every_group_at_once() {
    let group = |(pages, kind)| BlockGroup { pages, kind };
    let groups: Vec<BlockGroup> = GROUP_PAGES.into_iter().zip(KINDS).map(group).collect();
    let store = Arc::new(Store::new(Pool::of_groups(3 + 60, Some(6), &groups).unwrap(), ()));
    for needs in [[20, 0, 0], [0, 30, 0], [0, 0, 60], [10, 0, 30], [0, 15, 30], [20, 0, 0]] {
        let all = WritableBlocks::allocate(&store, &needs).unwrap();
        let more = WritableBlocks::allocate(&store, &[0, 0, 1]).err().unwrap();
        assert_eq!(more.kind(), ErrorKind::PoolFull { needed: 1, free: 0 });
        drop(all);
        store.lock().pool.check().unwrap();
    }
}

/// Blocks come from the slabs in which most is held, so that the others stay empty.
#[test]
fn the_fullest_slab_gives() {
    let store = Arc::new(Store::new(Pool::new(1 + 40, Some(8), &[1, 1]).unwrap(), ()));
    let mut all = WritableBlocks::allocate(&store, &[0, 40]).unwrap();
    let first = all.blocks()[19];
    let mut kept = vec![all.share_some(&[first])];
    drop(all);
    for _ in 0..7 {
        kept.push(WritableBlocks::allocate(&store, &[0, 1]).unwrap().share());
    }
    assert_eq!(WritableBlocks::allocate(&store, &[32, 0]).unwrap().blocks().len(), 32);
    store.lock().pool.check().unwrap();
}

/// Where most is soon given up, what is cached there makes room before another slab does.
#[test]
fn what_lasts_lies_in_few_slabs() {
    let groups = [(1, GroupKind::Full), (1, GroupKind::Window)];
    let groups = groups.map(|(pages, kind)| BlockGroup { pages, kind });
    let store = Arc::new(Store::new(Pool::of_groups(1 + 160, Some(8), &groups).unwrap(), ()));
    // While half of the arena is unclaimed, what is cached stays, wherever it lies.
    let half = WritableBlocks::allocate(&store, &[80, 0]).unwrap();
    let mut kept = Vec::new();
    for round in 0..10 {
        // Of 30 blocks, two stay; half of the rounds leave the others cached.
        let mut passing = WritableBlocks::allocate(&store, &[0, 30]).unwrap();
        if round % 2 == 0 {
            store.lock().pool.mark_indexed(passing.blocks());
        }
        let ends = [passing.blocks()[0], passing.blocks()[29]];
        kept.push(passing.share_some(&ends));
    }
    // Never were more than 50 blocks held at once: they lie in the seven slabs that these take.
    let rest = WritableBlocks::allocate(&store, &[24, 0]).unwrap();
    store.lock().pool.check().unwrap();
    drop((half, rest, kept));
}

#[test]
fn a_full_pool_changes_nothing() {
    let store = Arc::new(Store::new(Pool::new(11, None, &[1]).unwrap(), ()));
    let held = WritableBlocks::allocate(&store, &[6]).unwrap();
    let cached = WritableBlocks::allocate(&store, &[3]).unwrap();
    store.lock().pool.mark_indexed(cached.blocks());
    drop(cached);
    let before = store.lock().pool.counts(GroupId(0));
    let error = WritableBlocks::allocate(&store, &[5]).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::PoolFull { needed: 5, free: 4 });
    assert_eq!(store.lock().pool.counts(GroupId(0)), before);
    assert_eq!(WritableBlocks::allocate(&store, &[4]).unwrap().blocks().len(), 4);
    drop(held);
    store.lock().pool.check().unwrap();
}

/// More forks than 16 bits count: every one is an owner, and the last to go is one again.
#[test]
fn a_block_has_any_number_of_owners() {
    let store = Arc::new(Store::new(Pool::new(4, None, &[1]).unwrap(), ()));
    let first = WritableBlocks::allocate(&store, &[1]).unwrap();
    let block = first.blocks()[0];
    let forks: Vec<_> = (0..(1 << 16) + 5).map(|_| first.fork()).collect();
    assert_eq!(store.lock().pool.owners(block), (1 << 16) + 6);
    assert_eq!(store.lock().pool.references(block), (1 << 16) + 6);
    drop(forks);
    assert_eq!(store.lock().pool.owners(block), 1);
    drop(first);
    store.lock().pool.check().unwrap();
    assert_eq!(store.lock().pool.counts(GroupId(0)).held, 0);
}

#[test]
fn arenas_that_cannot_be_are_refused() {
    for (pages, slab, groups) in [
        (0, None, &[1][..]),
        (1, None, &[1]),
        (5, None, &[3]),
        (u64::MAX, None, &[1]),
        (10, Some(0), &[1]),
        (10, Some(2), &[3]),
        (10, Some(100), &[3]),
        (10, None, &[]),
        (10, None, &[0]),
    ] {
        let error = Pool::new(pages, slab, groups).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}
