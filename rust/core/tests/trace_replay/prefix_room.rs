//! A pool of pages with a prefix cache over the blocks of a trace: shared, counted, evicted by age.

use std::collections::{BTreeSet, HashMap};

use kvweave_core::scheduler::{RequestId, Room, Shortage};

use super::Request;

const PAGE: usize = 16;
const BLOCK: usize = 512;
const BLOCK_PAGES: usize = BLOCK / PAGE;

struct Cached {
    holders: usize,
    /// When it lost its last holder.
    since: u64,
}

#[derive(Default)]
struct Held {
    /// Blocks that can be found, of which this is a holder.
    blocks: Vec<u32>,
    /// Pages of its own.
    own: usize,
    /// Blocks of the prompt that have been computed.
    committed: usize,
}

/// Blocks of 512 tokens are found once they are computed, and stay until their pages are needed.
pub struct PrefixRoom<'a> {
    trace: &'a [Request],
    reuse: bool,
    total: usize,
    free: usize,
    cached: HashMap<u32, Cached>,
    idle: BTreeSet<(u64, u32)>,
    tick: u64,
    held: HashMap<RequestId, Held>,
}

impl<'a> PrefixRoom<'a> {
    pub fn new(trace: &'a [Request], pages: usize, reuse: bool) -> PrefixRoom<'a> {
        let (cached, idle, held) = (HashMap::new(), BTreeSet::new(), HashMap::new());
        PrefixRoom { trace, reuse, total: pages, free: pages, cached, idle, tick: 0, held }
    }

    /// Blocks of the longest prefix that is there; never all of the prompt.
    fn hits(&self, at: usize) -> usize {
        let request = &self.trace[at];
        let whole = if self.reuse { (request.input - 1) / BLOCK } else { 0 };
        let blocks = request.blocks.iter().take(whole);
        blocks.take_while(|block| self.cached.contains_key(block)).count()
    }

    /// Tokens of a request that are there now.
    pub fn cached(&self, at: usize) -> usize {
        self.hits(at) * BLOCK
    }

    fn available(&self) -> usize {
        self.free + self.idle.len() * BLOCK_PAGES
    }

    fn take(&mut self, pages: usize) {
        while self.free < pages {
            let (_, block) = self.idle.pop_first().unwrap();
            self.cached.remove(&block);
            self.free += BLOCK_PAGES;
        }
        self.free -= pages;
    }

    /// Says that the first `computed` tokens of a request are stored: whole blocks can be found.
    pub fn commit(&mut self, request: RequestId, computed: usize) {
        let prompt = &self.trace[request.0 as usize];
        let Some(held) = self.held.get_mut(&request) else { return };
        let whole = computed.min(prompt.input) / BLOCK;
        for &block in prompt.blocks.iter().take(whole).skip(held.committed) {
            if self.reuse && !self.cached.contains_key(&block) {
                self.cached.insert(block, Cached { holders: 1, since: 0 });
                held.own -= BLOCK_PAGES;
                held.blocks.push(block);
            }
        }
        held.committed = held.committed.max(whole);
    }

    /// Every page is free, cached or held, and as many requests hold some as are said to.
    pub fn check(&self, holders: usize) {
        let own: usize = self.held.values().map(|held| held.own).sum();
        assert_eq!(self.free + self.cached.len() * BLOCK_PAGES + own, self.total);
        let idle = self.cached.values().filter(|cached| cached.holders == 0).count();
        assert_eq!(idle, self.idle.len());
        assert_eq!(self.held.len(), holders);
    }
}

impl Room for PrefixRoom<'_> {
    fn fits(&self, _request: RequestId, tokens: usize) -> Result<(), Shortage> {
        let needed = tokens.div_ceil(PAGE);
        if needed > self.total { Err(Shortage::new(needed, self.total)) } else { Ok(()) }
    }

    fn admit(
        &mut self,
        request: RequestId,
        tokens: usize,
        spare: usize,
    ) -> Result<usize, Shortage> {
        assert!(!self.held.contains_key(&request), "held while waiting");
        let hits = self.hits(request.0 as usize);
        let blocks = self.trace[request.0 as usize].blocks[..hits].to_vec();
        let own = tokens.div_ceil(PAGE) - hits * BLOCK_PAGES;
        let woken = blocks.iter().filter(|block| self.cached[*block].holders == 0).count();
        let free = self.available() - woken * BLOCK_PAGES;
        if own + spare > free {
            return Err(Shortage::new(own + spare, free));
        }
        for block in &blocks {
            let cached = self.cached.get_mut(block).unwrap();
            if cached.holders == 0 {
                self.idle.remove(&(cached.since, *block));
            }
            cached.holders += 1;
        }
        self.take(own);
        self.held.insert(request, Held { blocks, own, committed: hits });
        Ok(hits * BLOCK)
    }

    fn grow(&mut self, request: RequestId, tokens: usize) -> Result<(), Shortage> {
        let held = &self.held[&request];
        let pages = held.own + held.blocks.len() * BLOCK_PAGES;
        let needed = tokens.div_ceil(PAGE).saturating_sub(pages);
        if needed > self.available() {
            return Err(Shortage::new(needed, self.available()));
        }
        if needed > 0 {
            self.take(needed);
            self.held.get_mut(&request).unwrap().own += needed;
        }
        Ok(())
    }

    fn gain(&self, request: RequestId) -> usize {
        let Some(held) = self.held.get(&request) else { return 0 };
        let alone = held.blocks.iter().filter(|block| self.cached[*block].holders == 1).count();
        held.own + alone * BLOCK_PAGES
    }

    fn release(&mut self, request: RequestId) {
        let Some(held) = self.held.remove(&request) else { return };
        self.free += held.own;
        // Back to front, so that a prefix outlives what follows it.
        for block in held.blocks.into_iter().rev() {
            let cached = self.cached.get_mut(&block).unwrap();
            cached.holders -= 1;
            if cached.holders == 0 {
                self.tick += 1;
                cached.since = self.tick;
                self.idle.insert((self.tick, block));
            }
        }
    }

    fn retract(&mut self, _request: RequestId, _tokens: usize) {
        panic!("what this room gives is there");
    }
}
