//! A scheduler's room beside a cache: what its requests take is counted, and what the cache could
//! give is asked, group by group.

use crate::error::Error;
use crate::scheduler::{BlockLedger, HomeGroup, RequestId, Room, Shortage};

use super::{KvCache, freeze};

/// A [`BlockLedger`] that admits nobody whose blocks the cache could not give.
///
/// Pages that are free may lie in slabs of another head group, where they serve nobody else: a
/// prompt that was promised room by their number alone would be computed in vain, or others would
/// have to give way for it. [`Self::look`] before each plan.
pub struct CacheRoom {
    cache: KvCache,
    ledger: BlockLedger,
    /// Caches that count the host's memory, in the order of the ledger's.
    homes: Vec<KvCache>,
    /// Blocks of each group of the pool that this plan has promised.
    promised: Vec<usize>,
    /// Whether this plan has anybody give way: the cache will have more than it has now.
    gives_back: bool,
}

impl CacheRoom {
    /// The room beside a cache, for prompts that are computed in chunks of at most so many tokens.
    ///
    /// # Errors
    /// `InvalidArgument` for chunks of no tokens.
    pub fn new(cache: &KvCache, chunk_tokens: usize) -> Result<CacheRoom, Error> {
        let ledger = cache.ledger(chunk_tokens)?;
        let groups = cache.0.store.lock().pool.group_count();
        let promised = vec![0; groups];
        let homes = Vec::new();
        Ok(CacheRoom { cache: cache.clone(), ledger, homes, promised, gives_back: false })
    }

    /// The same beside the host's memory: of each head group that may lie there, by its number, the
    /// cache that counts its blocks, and how many slots and newest blocks it has on the device: see
    /// [`HomeGroup`]. `part_tokens`: those of a part of a prompt whose blocks go there.
    ///
    /// # Errors
    /// As [`BlockLedger::with_homes`].
    pub fn with_homes(
        mut self,
        homes: &[(usize, KvCache, usize, usize)],
        part_tokens: usize,
    ) -> Result<CacheRoom, Error> {
        let group = |(group, cache, slots, newest): &(usize, KvCache, usize, usize)| {
            let pages = cache.0.store.read().pool.slab_pages_total() as usize;
            let total = pages / block_pages(cache);
            HomeGroup { group: *group, slots: *slots, newest: *newest, total }
        };
        let groups: Vec<HomeGroup> = homes.iter().map(group).collect();
        self.ledger = self.ledger.with_homes(&groups, part_tokens)?;
        self.homes = homes.iter().map(|(_, cache, ..)| cache.clone()).collect();
        Ok(self)
    }

    /// Looks at what is free now; from here on it is counted.
    pub fn look(&mut self) {
        let blocks = |cache: &KvCache| cache.available_pages() / block_pages(cache);
        let free: Vec<usize> = self.homes.iter().map(blocks).collect();
        self.ledger.tell_homes(&free);
        self.ledger.tell_free(self.cache.available_pages());
        self.promised.fill(0);
        self.gives_back = false;
    }

    /// What is counted.
    #[must_use]
    pub fn ledger(&self) -> &BlockLedger {
        &self.ledger
    }

    /// What is counted, to be told what a look-up found and what is to be reserved.
    pub fn ledger_mut(&mut self) -> &mut BlockLedger {
        &mut self.ledger
    }

    /// Blocks that the cache is asked for: those promised, some more, and as many again of every
    /// head group for each of `spare` requests.
    fn wanted(&self, more: impl Iterator<Item = usize>, spare: usize) -> Vec<usize> {
        let more = more.chain(std::iter::repeat(0));
        let spare = self.ledger.blocks_of(1).map(|blocks| blocks * spare);
        let each = self.promised.iter().zip(more).zip(spare.chain(std::iter::repeat(0)));
        each.map(|((promised, more), spare)| promised + more + spare).collect()
    }
}

impl CacheRoom {
    /// Room for all that a request takes.
    fn admit_whole(
        &mut self,
        request: RequestId,
        tokens: usize,
        spare: usize,
    ) -> Result<usize, Shortage> {
        let wanted = self.wanted(self.ledger.blocks_to_take(request, tokens), spare);
        // Of pages that others hold it is not known which group's they are.
        let asks = !self.gives_back && self.ledger.shared(request) == 0;
        let cached = self.ledger.admit_whole(request, tokens, spare)?;
        if asks && !self.cache.could_give(&wanted) {
            self.ledger.undo_admission(request);
            let needed = self.ledger.pages_of(tokens);
            return Err(Shortage::new(needed, self.ledger.free().min(needed)));
        }
        self.promised = self.wanted(self.ledger.blocks_to_take(request, tokens), 0);
        Ok(cached)
    }

    /// Room for its working set, and at home for the rest.
    fn admit_in_parts(
        &mut self,
        request: RequestId,
        tokens: usize,
        spare: usize,
    ) -> Result<usize, Shortage> {
        let wanted = self.wanted(self.ledger.working_set(tokens), spare);
        let cached = self.ledger.admit_in_parts(request, tokens, spare)?;
        if !self.gives_back && !self.cache.could_give(&wanted) {
            let needed = self.ledger.held(request);
            self.ledger.undo_admission(request);
            return Err(Shortage::new(needed, self.ledger.free().min(needed)));
        }
        self.promised = self.wanted(self.ledger.working_set(tokens), 0);
        Ok(cached)
    }
}

impl Room for CacheRoom {
    fn fits(&self, request: RequestId, tokens: usize) -> Result<(), Shortage> {
        self.ledger.fits(request, tokens)?;
        let could_hold = |blocks: &mut dyn Iterator<Item = usize>| {
            let mut needs: Vec<usize> = blocks.collect();
            needs.resize(self.promised.len(), 0);
            self.cache.0.store.lock().pool.could_hold(&needs)
        };
        if could_hold(&mut self.ledger.blocks_of(tokens))
            || self.ledger.leaves(request) && could_hold(&mut self.ledger.working_set(tokens))
        {
            return Ok(());
        }
        let total = self.ledger.total();
        Err(Shortage::new(self.ledger.pages_of(tokens).max(total + 1), total))
    }

    fn admit(
        &mut self,
        request: RequestId,
        tokens: usize,
        spare: usize,
    ) -> Result<usize, Shortage> {
        let parts = self.ledger.may_part(request);
        match self.admit_whole(request, tokens, spare) {
            Err(_) if parts && !self.ledger.is_worth_waiting(request, tokens) => {
                self.admit_in_parts(request, tokens, spare)
            }
            outcome => outcome,
        }
    }

    fn grow(&mut self, request: RequestId, tokens: usize) -> Result<(), Shortage> {
        let before = self.ledger.held(request);
        self.ledger.grow(request, tokens)?;
        if self.ledger.held(request) > before {
            self.promised = self.wanted(self.ledger.blocks_of(1), 0);
        }
        Ok(())
    }

    fn gain(&self, request: RequestId) -> usize {
        self.ledger.gain(request)
    }

    fn release(&mut self, request: RequestId) {
        self.gives_back |= self.ledger.held(request) > 0;
        self.ledger.release(request);
    }

    fn retract(&mut self, request: RequestId, tokens: usize) {
        self.ledger.retract(request, tokens);
    }
}

/// Pages of a block of the first head group.
fn block_pages(cache: &KvCache) -> usize {
    cache.0.groups.pages().first().map_or(1, |&pages| pages as usize)
}

impl KvCache {
    /// Whether so many blocks of each group of the pool could be had now, frozen ones that nobody
    /// reads giving way.
    fn could_give(&self, needs: &[usize]) -> bool {
        let mut state = self.0.store.lock();
        state.pool.fits(needs) || freeze::fits(&self.0, &mut state, needs)
    }
}
