//! A room that counts: for an engine whose cache is asked elsewhere, and for simulations.

use hashbrown::HashMap;

use crate::error::Error;
use crate::heads::LocalWindow;

use super::homes::{HomeGroup, Homes};
use super::request::RequestId;
use super::room::{Room, Shortage};

/// What a head group takes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerGroup {
    /// Pages of one block.
    pub block_pages: usize,
    /// What the group keeps; `None` for all tokens.
    pub window: Option<LocalWindow>,
}

/// A prompt that takes at most one of so many of all pages waits for room as a whole, rather than
/// be computed in parts, each of which reads all before it over the bus.
const WHOLE_SHARE: usize = 4;

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

    /// The same beside the host's memory, where blocks of some head groups may lie: of a request
    /// that [`Self::may_leave`], behind each part of so many tokens of its prompt. Where not all
    /// of such a request fits, it is admitted by its working set: what it has on the device at a
    /// time, and room at home for the rest.
    ///
    /// # Errors
    /// `InvalidArgument` for a group that is not there, or keeps a window, and parts of no tokens.
    pub fn with_homes(
        mut self,
        homes: &[HomeGroup],
        part_tokens: usize,
    ) -> Result<BlockLedger, Error> {
        if part_tokens == 0 {
            return Err(Error::invalid("part_tokens", "at least 1", part_tokens));
        }
        for home in homes {
            let group = self.groups.get(home.group);
            if group.is_none_or(|group| group.window.is_some()) {
                let expected = "a head group that keeps every token";
                return Err(Error::invalid("home", expected, home.group));
            }
        }
        (self.homes, self.part_tokens) = (Homes::new(homes), part_tokens);
        Ok(self)
    }

    /// Pages that could be had now, as the cache says: free, or cached and held by nobody. From
    /// here on the ledger counts.
    pub fn tell_free(&mut self, pages: usize) {
        self.free = pages.min(self.total).saturating_sub(self.homes.unmet_pages());
    }

    /// Blocks of the host's memory that could be had now, of each group that has some.
    pub fn tell_homes(&mut self, blocks: &[usize]) {
        self.homes.tell_free(blocks);
    }

    /// The groups that may lie in the host's memory.
    #[must_use]
    pub fn homes(&self) -> &[HomeGroup] {
        self.homes.groups()
    }

    /// Says of a request that has not been admitted whether its prompt may be computed in parts.
    pub fn may_leave(&mut self, request: RequestId, leaves: bool) {
        self.accounts.entry(request).or_default().leaves =
            leaves && !self.homes.groups().is_empty();
    }

    /// Says what a request that was admitted by its working set holds by now: pages of the device,
    /// and blocks at home of each group that has some.
    pub fn tell_held(&mut self, request: RequestId, pages: usize, homes: &[usize]) {
        self.homes.tell_held(request, pages, homes);
    }

    /// Says that a request which was admitted by its working set has taken all that it will.
    pub fn tell_filled(&mut self, request: RequestId) {
        self.homes.filled(request);
    }

    /// Whether a request was admitted by its working set.
    #[must_use]
    pub fn is_in_parts(&self, request: RequestId) -> bool {
        self.homes.is_promised(request)
    }

    /// Whether a request that does not fit as a whole may be admitted by its working set, now.
    #[must_use]
    pub fn may_part(&self, request: RequestId) -> bool {
        self.leaves(request) && !self.exhausted
    }

    /// Whether a request that does not fit as a whole now, and [`Self::may_part`], had better wait
    /// until it does: it is small, and what others hold who will end would suffice.
    #[must_use]
    pub fn is_worth_waiting(&self, request: RequestId, tokens: usize) -> bool {
        let account = self.accounts.get(&request).copied().unwrap_or_default();
        let pages = self.pages_of(tokens.max(account.reserved)).saturating_sub(account.shared);
        let held: usize = self.accounts.values().map(|account| account.held).sum();
        pages <= self.total / WHOLE_SHARE && held > 0 && pages <= self.free + held
    }

    /// Whether a request's prompt may be computed in parts.
    #[must_use]
    pub fn leaves(&self, request: RequestId) -> bool {
        self.accounts.get(&request).is_some_and(|account| account.leaves)
    }

    /// Blocks of each group that `tokens` tokens have on the device at a time.
    pub fn working_set(&self, tokens: usize) -> impl Iterator<Item = usize> + '_ {
        self.groups.iter().enumerate().map(move |(number, group)| {
            let blocks = self.blocks(group, tokens);
            self.homes.of(number).map_or(blocks, |home| home.working_set(blocks))
        })
    }

    /// Blocks at home of `tokens` tokens, of each group that has some there.
    fn away(&self, tokens: usize) -> Vec<usize> {
        let blocks = tokens.div_ceil(self.page_tokens);
        self.homes.groups().iter().map(|home| home.away(blocks)).collect()
    }

    fn pages_in(&self, blocks: impl Iterator<Item = usize>) -> usize {
        self.groups.iter().zip(blocks).map(|(group, blocks)| group.block_pages * blocks).sum()
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

    /// As [`Room::admit`], by the working set of a request that [`Self::may_part`].
    ///
    /// # Errors
    /// What is missing.
    pub fn admit_in_parts(
        &mut self,
        request: RequestId,
        tokens: usize,
        spare: usize,
    ) -> Result<usize, Shortage> {
        let account = self.accounts.get(&request).copied().unwrap_or_default();
        let tokens = tokens.max(account.reserved);
        let away = self.away(tokens);
        self.homes.fits(&away, false)?;
        let pages = self.pages_in(self.working_set(tokens));
        self.take(pages, spare)?;
        let spared = self.pages_of(tokens) - pages;
        self.homes.promise(request, away, (pages, spared));
        // No more is looked for than its first part.
        let cached = account.cached.min(self.part_tokens);
        self.accounts.insert(request, Account { held: pages, shared: 0, cached, ..account });
        Ok(cached)
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
        let parts = self.may_part(request) && !self.is_worth_waiting(request, tokens);
        match self.admit_whole(request, tokens, spare) {
            Err(_) if parts => self.admit_in_parts(request, tokens, spare),
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
    use super::{BlockLedger, HomeGroup, LedgerGroup, LocalWindow, RequestId, Room};

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

    #[test]
    fn what_does_not_fit_as_a_whole_is_admitted_by_its_working_set() {
        let group = |block_pages| LedgerGroup { block_pages, window: None };
        let home = HomeGroup { group: 1, slots: 2, newest: 3, total: 30 };
        let ledger = BlockLedger::new(60, 4, 16, &[group(1), group(4)]).unwrap();
        let mut ledger = ledger.with_homes(&[home], 8).unwrap();
        let (one, other, third) = (RequestId(1), RequestId(2), RequestId(3));
        // Of 16 blocks: 16 pages of the first group, and five blocks of the second.
        assert!(ledger.fits(one, 64).is_err());
        for request in [one, other, third] {
            ledger.may_leave(request, true);
        }
        assert!(ledger.fits(one, 64).is_ok());
        assert!(ledger.fits(one, 128).unwrap_err().at_home);
        assert!(!ledger.fits(one, 164).unwrap_err().at_home || ledger.away(164)[0] > 30);
        assert_eq!(ledger.admit(one, 64, 0), Ok(0));
        assert_eq!((ledger.held(one), ledger.is_in_parts(one)), (36, true));
        // Its 15 blocks at home are promised: another one's fit too, and a third's do not.
        ledger.tell_free(60);
        ledger.tell_homes(&[30]);
        assert_eq!(ledger.free(), 24);
        assert!(!ledger.admit(other, 64, 0).unwrap_err().at_home);
        assert_eq!(ledger.admit(other, 16, 0), Ok(0));
        assert!(!ledger.is_in_parts(other));
        // What it has taken of its promise is told, and no more left out of what is free.
        ledger.tell_held(one, 30, &[10]);
        ledger.tell_free(60 - 30 - 20);
        ledger.tell_homes(&[30 - 10]);
        assert_eq!(ledger.free(), 4);
        assert_eq!(ledger.homes.fits(&[15], false), Ok(()));
        assert!(ledger.homes.fits(&[16], false).unwrap_err().at_home);
        // It decodes: a block of each group for each page from now on.
        ledger.tell_free(20);
        ledger.grow(one, 64).unwrap();
        assert_eq!(ledger.held(one), 36);
        ledger.grow(one, 65).unwrap();
        assert_eq!(ledger.held(one), 41);
        ledger.release(one);
        assert_eq!(ledger.homes.fits(&[30], false), Ok(()));
        assert_eq!((ledger.is_in_parts(one), ledger.leaves(one)), (false, false));
    }

    #[test]
    fn what_is_small_waits_for_room_as_a_whole_while_others_hold_it() {
        let group = |block_pages| LedgerGroup { block_pages, window: None };
        let home = HomeGroup { group: 1, slots: 2, newest: 3, total: 300 };
        let ledger = BlockLedger::new(100, 4, 16, &[group(1), group(4)]).unwrap();
        let mut ledger = ledger.with_homes(&[home], 8).unwrap();
        let requests = [RequestId(1), RequestId(2), RequestId(3)];
        for request in requests {
            ledger.may_leave(request, true);
        }
        let [large, small, larger] = requests;
        assert_eq!(ledger.admit(large, 64, 0), Ok(0));
        assert_eq!((ledger.held(large), ledger.is_in_parts(large)), (80, false));
        // 25 pages of 100, of which 20 are free: as a whole, or not now. A larger one does not wait,
        // whose working set may be smaller than all of it.
        assert!(ledger.is_worth_waiting(small, 20));
        assert!(!ledger.admit(small, 20, 0).unwrap_err().at_home);
        assert!(!ledger.is_worth_waiting(larger, 21));
        // Nobody who holds anything will give it back: what is taken beside goes by itself.
        ledger.release(large);
        ledger.tell_free(24);
        assert!(!ledger.is_worth_waiting(small, 20));
        ledger.tell_free(25);
        assert_eq!(ledger.admit(small, 20, 0), Ok(0));
        assert!(!ledger.is_in_parts(small));
    }

    #[test]
    fn a_home_of_a_group_that_has_none_is_refused() {
        let window = Some(LocalWindow { sink: 4, recent: 8 });
        let groups = [LedgerGroup { block_pages: 1, window }];
        let ledger = || BlockLedger::new(60, 4, 16, &groups).unwrap();
        let home = |group| HomeGroup { group, slots: 2, newest: 3, total: 30 };
        assert!(ledger().with_homes(&[home(0)], 8).is_err());
        assert!(ledger().with_homes(&[home(1)], 8).is_err());
        assert!(ledger().with_homes(&[], 0).is_err());
    }
}
