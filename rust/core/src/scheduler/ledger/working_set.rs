//! Admission by working sets: what a prompt has on the device at a time, where the rest of its
//! pages may lie in the host's memory.

use crate::error::Error;

use super::super::homes::{HomeGroup, Homes};
use super::super::request::RequestId;
use super::super::room::Shortage;
use super::{Account, BlockLedger};

/// A prompt that takes at most one of so many of all pages waits for room as a whole, rather than
/// be computed in parts, each of which reads all before it over the bus.
const WHOLE_SHARE: usize = 4;

impl BlockLedger {
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
    pub(super) fn away(&self, tokens: usize) -> Vec<usize> {
        let blocks = tokens.div_ceil(self.page_tokens);
        self.homes.groups().iter().map(|home| home.away(blocks)).collect()
    }

    pub(super) fn pages_in(&self, blocks: impl Iterator<Item = usize>) -> usize {
        self.groups.iter().zip(blocks).map(|(group, blocks)| group.block_pages * blocks).sum()
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
}

#[cfg(test)]
mod tests {
    use super::super::{BlockLedger, LedgerGroup, LocalWindow, RequestId, Room};
    use super::HomeGroup;

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
        // 25 pages of 100, of which 20 are free: as a whole, or not now. A larger one does not
        // wait, whose working set may be smaller than all of it.
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
