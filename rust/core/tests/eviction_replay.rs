//! Real traces through a cache whose room is a share of what they name, by each order of eviction.
//!
//! Requests come one after the other; each reads the prefix that is cached and leaves its blocks
//! behind. `cargo test --test eviction_replay -- --nocapture` prints the table.

#[expect(dead_code, reason = "lengths and times are for the scheduler's tests")]
#[path = "trace_replay/trace.rs"]
mod trace;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kvweave_core::{Admission, Advice, CacheConfig, Eviction, Hint, KvCache, KvDtype, KvShape};
use trace::read;

/// A page stands for a block of a trace: its tokens are the block's number.
const PAGE: usize = 4;
const NOBODYS: u32 = u32::MAX / 2;

struct Trace(Vec<Vec<u32>>);

impl Trace {
    fn of(name: &str) -> Trace {
        Trace(read(name).into_iter().map(|request| request.blocks).collect())
    }

    fn room(&self, percent: usize) -> usize {
        let unlike: BTreeSet<u32> = self.0.iter().flatten().copied().collect();
        unlike.len() * percent / 100
    }

    /// Blocks that no later request names, by the request that was the last to do so.
    fn ends(&self) -> BTreeMap<usize, BTreeSet<u32>> {
        let mut last = HashMap::new();
        for (at, blocks) in self.0.iter().enumerate() {
            last.extend(blocks.iter().map(|&block| (block, at)));
        }
        let mut ends: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
        last.into_iter().for_each(|(block, at)| {
            ends.entry(at).or_default().insert(block);
        });
        ends
    }

    /// Share of blocks that were found, in a cache with room for so many.
    ///
    /// With `ends`, whoever names a block last says so (`Hint::Done`), as where chats are closed.
    fn found(&self, room: usize, eviction: Eviction, with_ends: bool) -> f64 {
        let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
        let config = CacheConfig::new(shape, 0).sized_for(room as u64 + 1).unwrap();
        let cache = KvCache::new(CacheConfig { eviction, ..config }).unwrap();
        let ends = if with_ends { self.ends() } else { BTreeMap::new() };
        let (mut found, mut all) = (0, 0);
        for (at, blocks) in self.0.iter().enumerate() {
            let mut tokens: Vec<u32> = blocks.iter().flat_map(|&block| [block; PAGE]).collect();
            let whole = tokens.len();
            // The last token of a prompt is always computed: it is one of nobody's.
            tokens.push(NOBODYS);
            all += blocks.len();
            let mut request = cache.admit(&Admission::new(&tokens)).unwrap();
            found += request.plan().prefix_tokens() / PAGE;
            request.commit(whole, whole).unwrap();
            let done = Advice { hint: Hint::Done, ..Advice::default() };
            for block in ends.get(&at).into_iter().flatten() {
                let place = blocks.iter().position(|other| other == block).unwrap();
                request.advise(place * PAGE..(place + 1) * PAGE, done).unwrap();
            }
        }
        cache.check().unwrap();
        found as f64 / all as f64
    }

    /// The same by who knows the future: what is used furthest from now goes, or never comes
    /// (Belady 1966).
    fn found_by_belady(&self, room: usize) -> f64 {
        const NEVER: usize = usize::MAX;
        let mut next: HashMap<u32, usize> = HashMap::new();
        let mut uses: Vec<Vec<usize>> = Vec::with_capacity(self.0.len());
        for (at, blocks) in self.0.iter().enumerate().rev() {
            uses.push(blocks.iter().map(|block| *next.get(block).unwrap_or(&NEVER)).collect());
            next.extend(blocks.iter().map(|&block| (block, at)));
        }
        uses.reverse();
        let (mut cached, mut by_use) = (HashMap::new(), BTreeSet::new());
        let (mut found, mut all) = (0, 0);
        for (blocks, uses) in self.0.iter().zip(uses) {
            all += blocks.len();
            found += blocks.iter().take_while(|block| cached.contains_key(*block)).count();
            for (&block, used) in blocks.iter().zip(uses) {
                if let Some(before) = cached.remove(&block) {
                    by_use.remove(&(before, block));
                }
                if used != NEVER {
                    cached.insert(block, used);
                    by_use.insert((used, block));
                }
            }
            while by_use.len() > room {
                cached.remove(&by_use.pop_last().unwrap().1);
            }
        }
        found as f64 / all as f64
    }
}

/// Shares that were found: least recently used, cost-aware, the same told of ends, and by Belady.
fn shares(name: &str, trace: &Trace, percent: usize) -> [f64; 4] {
    let room = trace.room(percent);
    let shares = [
        trace.found(room, Eviction::Lru, false),
        trace.found(room, Eviction::CostAware, false),
        trace.found(room, Eviction::CostAware, true),
        trace.found_by_belady(room),
    ];
    let [lru, cost_aware, told, best] = shares;
    println!(
        "{name:<22} {percent:>3} % | lru {lru:.4}  cost-aware {cost_aware:.4}  told of ends \
         {told:.4}  best {best:.4} | of the gap {:.2}",
        (told - lru) / (best - lru),
    );
    shares
}

#[test]
fn cost_aware_finds_no_less_than_least_recently_used() {
    for name in ["mooncake_conversation", "mooncake_synthetic"] {
        let trace = Trace::of(name);
        for percent in [5, 10, 25] {
            let [lru, cost_aware, told, best] = shares(name, &trace, percent);
            assert!(lru <= cost_aware && cost_aware <= told && told <= best + 1e-9);
        }
    }
}

/// An hour of chats: 63 of 100 blocks are never read again, and who is told of that needs no more.
#[test]
fn told_of_the_ends_of_chats_it_finds_what_there_is_to_find() {
    let trace = Trace::of("mooncake_conversation");
    let [lru, _, told, best] = shares("conversation", &trace, 10);
    assert!(told - lru > 0.95 * (best - lru));
}
