//! A room that counts: for an engine whose cache is asked elsewhere, and for simulations.

use hashbrown::HashMap;

use crate::error::Error;
use crate::heads::LocalWindow;

use super::homes::Homes;
use super::request::RequestId;
use super::room::{Room, Shortage};

mod working_set;

/// What a head group takes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerGroup {
    /// Pages of one block.
    pub block_pages: usize,
    /// What the group keeps; `None` for all tokens.
    pub window: Option<LocalWindow>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Pages that are counted as this request's.
    held: usize,
    /// Tokens that are there already, and pages of them that are paid for by others.
    cached: usize,
    shared: usize,
    /// Tokens that room is taken for at admission, where these are more than are known then.
    reserved: usize,
    /// Whether its prompt may be computed in parts, whose blocks go home behind each.
    leaves: bool,
}

/// Counts pages: each request pays for all its tokens, but for pages that others were said to
/// hold. Never counts less than a cache takes, so that what it promises can be had: but for what
/// the cache holds beside, which [`Self::tell_free`] says, and for pages of a request that gives
/// way which others read too. These come free with the last that reads them; whoever finds no room
/// for that reason says so by [`Scheduler::not_done`](super::Scheduler::not_done).
#[derive(Clone, Debug)]
pub struct BlockLedger {
    page_tokens: usize,
    chunk_tokens: usize,
    groups: Vec<LedgerGroup>,
    total: usize,
    free: usize,
    /// Whether memory has fallen short of what was promised: the next that is asked for is refused.
    exhausted: bool,
    accounts: HashMap<RequestId, Account>,
    /// The host's memory, and the tokens of a part of a prompt whose blocks go there.
    homes: Homes,
    part_tokens: usize,
}

impl BlockLedger {
    /// A room of `pages` pages for blocks of `page_tokens` tokens, of one page for a full group or
    /// as `groups` say; prompts are computed in chunks of at most `chunk_tokens`.
    ///
    /// # Errors
    /// `InvalidArgument` for nothing of anything.
    pub fn new(
        pages: usize,
        page_tokens: usize,
        chunk_tokens: usize,
        groups: &[LedgerGroup],
    ) -> Result<BlockLedger, Error> {
        let full = [LedgerGroup { block_pages: 1, window: None }];
        let groups = if groups.is_empty() { full.to_vec() } else { groups.to_vec() };
        let smallest = groups.iter().map(|group| group.block_pages).min().unwrap_or(0);
        let given = [("pages", pages), ("page_tokens", page_tokens), ("block_pages", smallest)];
        for (name, value) in given.into_iter().chain([("chunk_tokens", chunk_tokens)]) {
            if value == 0 || i32::try_from(value).is_err() {
                return Err(Error::invalid(name, "1 <= number <= 2147483647", value));
            }
        }
        let (total, free) = (pages, pages);
        let accounts = HashMap::new();
        let (exhausted, homes, part_tokens) = (false, Homes::default(), chunk_tokens);
        Ok(BlockLedger {
            page_tokens,
            chunk_tokens,
            groups,
            total,
            free,
            exhausted,
            accounts,
            homes,
            part_tokens,
        })
    }

    /// Pages that could be had now, as the cache says: free, or cached and held by nobody. From
    /// here on the ledger counts.
    pub fn tell_free(&mut self, pages: usize) {
        self.free = pages.min(self.total).saturating_sub(self.homes.unmet_pages());
    }

    /// As [`Room::admit`], with room for all that a request takes.
    ///
    /// # Errors
    /// What is missing.
    pub fn admit_whole(
        &mut self,
        request: RequestId,
        tokens: usize,
        spare: usize,
    ) -> Result<usize, Shortage> {
        let account = self.accounts.get(&request).copied().unwrap_or_default();
        let tokens = tokens.max(account.reserved);
        let pages = self.pages_of(tokens).saturating_sub(account.shared);
        self.take(pages, spare)?;
        self.accounts.insert(request, Account { held: pages, ..account });
        Ok(account.cached)
    }

    /// Says of a request that has not been admitted how many of its tokens are cached, and how
    /// many pages of these are held by others already.
    pub fn expect(&mut self, request: RequestId, cached: usize, shared: usize) {
        let account = self.accounts.entry(request).or_default();
        (account.cached, account.shared) = (cached, shared);
    }

    /// Says of a request that has not been admitted that room for `tokens` in all is to be taken
    /// when it is, so that it needs none later.
    pub fn reserve(&mut self, request: RequestId, tokens: usize) {
        self.accounts.entry(request).or_default().reserved = tokens;
    }

    /// Pages that could be had, as far as is counted.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free
    }

    /// Pages in all.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// Pages that a request is counted to hold.
    #[must_use]
    pub fn held(&self, request: RequestId) -> usize {
        self.accounts.get(&request).map_or(0, |account| account.held)
    }

    /// Requests that are spoken of.
    #[must_use]
    pub fn accounts(&self) -> usize {
        self.accounts.len()
    }

    /// Pages of `tokens` tokens.
    #[must_use]
    pub fn pages_of(&self, tokens: usize) -> usize {
        self.groups.iter().map(|group| group.block_pages * self.blocks(group, tokens)).sum()
    }

    /// Blocks of each group of `tokens` tokens.
    pub fn blocks_of(&self, tokens: usize) -> impl Iterator<Item = usize> + '_ {
        self.groups.iter().map(move |group| self.blocks(group, tokens))
    }

    fn blocks(&self, group: &LedgerGroup, tokens: usize) -> usize {
        let all = tokens.div_ceil(self.page_tokens);
        match group.window {
            Some(window) => all.min(window.blocks(self.page_tokens, self.chunk_tokens)),
            None => all,
        }
    }

    /// Pages of what a request which has not been admitted will read that are held by others.
    #[must_use]
    pub fn shared(&self, request: RequestId) -> usize {
        self.accounts.get(&request).map_or(0, |account| account.shared)
    }

    /// Blocks of each group that a request which has not been admitted would take then, for its
    /// first `tokens`: none for what is cached of them.
    pub fn blocks_to_take(
        &self,
        request: RequestId,
        tokens: usize,
    ) -> impl Iterator<Item = usize> + '_ {
        let account = self.accounts.get(&request).copied().unwrap_or_default();
        let cached = account.cached / self.page_tokens;
        let tokens = tokens.max(account.reserved);
        self.groups.iter().map(move |group| {
            let blocks = self.blocks(group, tokens);
            if group.window.is_some() { blocks } else { blocks.saturating_sub(cached) }
        })
    }

    /// Has a request that was admitted hold nothing again, as if it had not been.
    pub fn undo_admission(&mut self, request: RequestId) {
        if let Some(account) = self.accounts.get_mut(&request) {
            self.free += std::mem::take(&mut account.held);
        }
        self.homes.release(request);
    }

    /// Takes pages, and leaves as many as `spare` requests take for their next tokens.
    fn take(&mut self, pages: usize, spare: usize) -> Result<(), Shortage> {
        let needed = pages + spare.saturating_mul(self.pages_of(1));
        let exhausted = std::mem::take(&mut self.exhausted);
        let free = if exhausted { 0 } else { self.free };
        if exhausted || (pages > 0 && needed > free) {
            return Err(Shortage::new(needed, free));
        }
        self.free -= pages;
        Ok(())
    }
}

impl Room for BlockLedger {
    fn fits(&self, request: RequestId, tokens: usize) -> Result<(), Shortage> {
        let mut needed = self.pages_of(tokens);
        if needed > self.total && self.leaves(request) {
            needed = self.pages_in(self.working_set(tokens));
            self.homes.fits(&self.away(tokens), true)?;
        }
        if needed > self.total { Err(Shortage::new(needed, self.total)) } else { Ok(()) }
    }

    fn admit(
        &mut self,
        request: RequestId,
        tokens: usize,
        spare: usize,
    ) -> Result<usize, Shortage> {
        let parts = self.may_part(request);
        match self.admit_whole(request, tokens, spare) {
            Err(_) if parts && !self.is_worth_waiting(request, tokens) => {
                self.admit_in_parts(request, tokens, spare)
            }
            outcome => outcome,
        }
    }

    fn grow(&mut self, request: RequestId, tokens: usize) -> Result<(), Shortage> {
        let Some(account) = self.accounts.get(&request).copied() else { return Ok(()) };
        let spared = self.homes.filled(request).unwrap_or(account.shared);
        let needed = self.pages_of(tokens).saturating_sub(spared);
        self.take(needed.saturating_sub(account.held), 0)?;
        if needed > account.held {
            self.accounts.insert(request, Account { held: needed, ..account });
        }
        Ok(())
    }

    fn gain(&self, request: RequestId) -> usize {
        self.held(request)
    }

    fn release(&mut self, request: RequestId) {
        if let Some(account) = self.accounts.remove(&request) {
            self.free = (self.free + account.held).min(self.total);
        }
        self.homes.release(request);
    }

    fn retract(&mut self, request: RequestId, tokens: usize) {
        let pages = self.pages_of(tokens);
        if let Some(account) = self.accounts.get_mut(&request) {
            let held = account.held.min(pages.saturating_sub(account.shared));
            self.free += account.held - held;
            account.held = held;
        }
        self.exhausted = true;
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockLedger, LedgerGroup, LocalWindow, RequestId, Room};

    #[test]
    fn what_is_left_for_others_is_a_block_of_every_group() {
        let group = |block_pages| LedgerGroup { block_pages, window: None };
        let mut ledger = BlockLedger::new(100, 4, 16, &[group(3), group(7)]).unwrap();
        // Five blocks of ten pages, and one each for five others.
        assert!(ledger.admit(RequestId(1), 20, 6).is_err());
        assert_eq!(ledger.admit(RequestId(1), 20, 5), Ok(0));
        assert_eq!(ledger.free(), 50);
    }

    #[test]
    fn where_memory_fell_short_somebody_is_refused_though_nothing_is_counted() {
        let window = Some(LocalWindow { sink: 4, recent: 8 });
        let groups = [LedgerGroup { block_pages: 1, window }];
        let mut ledger = BlockLedger::new(100, 4, 4, &groups).unwrap();
        let one = RequestId(1);
        ledger.admit(one, 400, 0).unwrap();
        // Its window is full: it holds what it ever will.
        ledger.grow(one, 401).unwrap();
        ledger.retract(one, 400);
        assert!(ledger.grow(one, 401).is_err());
        ledger.grow(one, 401).unwrap();
    }

    #[test]
    fn what_is_reserved_is_taken_at_admission_and_never_asked_for_again() {
        let mut ledger = BlockLedger::new(10, 4, 16, &[]).unwrap();
        let (one, other) = (RequestId(1), RequestId(2));
        ledger.reserve(one, 24);
        assert_eq!(ledger.admit(one, 5, 0), Ok(0));
        assert_eq!((ledger.held(one), ledger.free()), (6, 4));
        assert!(ledger.admit(other, 17, 0).is_err());
        assert_eq!(ledger.admit(other, 16, 0), Ok(0));
        // Nothing is free, and the first grows all the same as far as it said.
        for tokens in 6..=24 {
            ledger.grow(one, tokens).unwrap();
        }
        assert!(ledger.grow(one, 25).is_err());
        assert!(ledger.grow(other, 17).is_err());
        ledger.release(one);
        assert_eq!((ledger.free(), ledger.accounts()), (6, 1));
        // What it knows by now may be more than was reserved.
        ledger.reserve(one, 4);
        assert_eq!(ledger.admit(one, 9, 0), Ok(0));
        assert_eq!(ledger.held(one), 3);
    }
}
