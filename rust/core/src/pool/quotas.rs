//! Which cached blocks are beyond what their namespace may keep: they go before all others.
//!
//! A quota takes nothing away while there is room. Where room is wanted, the account that is
//! furthest beyond its own gives first, in the order of the pool.

use std::collections::BTreeSet;

use crate::error::Error;
use crate::ids::{AccountId, BlockId, GroupId};
use crate::reserve::filled;

use super::victims::Rank;

/// The cached blocks of one account.
struct Account {
    /// Blocks of each group that may be cached.
    allowed: usize,
    /// By group, the next to go first.
    cached: Vec<BTreeSet<(Rank, BlockId)>>,
}

/// The accounts of a pool, and whose each block is.
pub(super) struct Quotas {
    accounts: Vec<Option<Account>>,
    groups: usize,
    /// By block number.
    owners: Vec<Option<AccountId>>,
    /// Where each cached block stands, by block number.
    ranks: Vec<Option<Rank>>,
}

impl Quotas {
    pub(super) fn new(blocks: usize, groups: usize) -> Result<Quotas, Error> {
        let owners = filled("accounts of blocks", None, blocks)?;
        let ranks = filled("ranks of blocks", None, blocks)?;
        Ok(Quotas { accounts: Vec::new(), groups, owners, ranks })
    }

    pub(super) fn open(&mut self, account: AccountId, allowed: usize) {
        let accounts = self.accounts.len().max(account.index() + 1);
        self.accounts.resize_with(accounts, || None);
        let cached = vec![BTreeSet::new(); self.groups];
        self.accounts[account.index()] = Some(Account { allowed, cached });
    }

    /// Closes an account; its blocks are nobody's.
    pub(super) fn close(&mut self, account: AccountId) {
        self.accounts[account.index()] = None;
        let mine = self.owners.iter_mut().filter(|owner| **owner == Some(account));
        mine.for_each(|owner| *owner = None);
    }

    fn account(&mut self, account: Option<AccountId>) -> Option<&mut Account> {
        self.accounts.get_mut(account?.index())?.as_mut()
    }

    pub(super) fn set_allowed(&mut self, account: AccountId, allowed: usize) {
        if let Some(account) = self.account(Some(account)) {
            account.allowed = allowed;
        }
    }

    /// Says whose a block is, cached or not.
    pub(super) fn assign(&mut self, group: GroupId, block: BlockId, owner: Option<AccountId>) {
        if self.owners[block.index()] != owner {
            let rank = self.leave(group, block);
            self.owners[block.index()] = owner;
            rank.into_iter().for_each(|rank| self.enter(group, block, rank));
        }
    }

    pub(super) fn enter(&mut self, group: GroupId, block: BlockId, rank: Rank) {
        self.ranks[block.index()] = Some(rank);
        if let Some(account) = self.account(self.owners[block.index()]) {
            account.cached[group.index()].insert((rank, block));
        }
    }

    /// Takes a block out; where it stood.
    pub(super) fn leave(&mut self, group: GroupId, block: BlockId) -> Option<Rank> {
        let rank = self.ranks[block.index()].take()?;
        if let Some(account) = self.account(self.owners[block.index()]) {
            account.cached[group.index()].remove(&(rank, block));
        }
        Some(rank)
    }

    /// A block that is not cached is nobody's: its content is gone.
    pub(super) fn forget(&mut self, block: BlockId) {
        self.owners[block.index()] = None;
    }

    /// The first block of the account that is furthest beyond its quota.
    pub(super) fn next(&self, group: GroupId) -> Option<BlockId> {
        let beyond = self.accounts.iter().flatten().filter_map(|account| {
            let cached = &account.cached[group.index()];
            (cached.len() > account.allowed).then(|| (cached.len() - account.allowed, cached))
        });
        let (_, furthest) = beyond.max_by_key(|&(excess, _)| excess)?;
        furthest.first().map(|&(_, block)| block)
    }

    /// How many blocks of a group an account may have cached, and how many are.
    pub(super) fn allowance(&self, account: AccountId, group: GroupId) -> (usize, usize) {
        let account = self.accounts.get(account.index()).and_then(Option::as_ref);
        account.map_or((0, 0), |account| (account.allowed, account.cached[group.index()].len()))
    }

    /// Compares with the cached blocks of a group.
    pub(super) fn check(&self, group: GroupId, cached: &[(Rank, BlockId)]) -> Result<(), Error> {
        let mut owned = 0;
        for &(_, block) in cached {
            let Some(rank) = self.ranks[block.index()] else {
                return Err(Error::inconsistent("rank", "one of a cached block", block.index()));
            };
            let Some(owner) = self.owners[block.index()] else { continue };
            let account = self.accounts.get(owner.index()).and_then(Option::as_ref);
            let account = account.ok_or_else(|| Error::inconsistent("account", "open", owner.0))?;
            owned += 1;
            if !account.cached[group.index()].contains(&(rank, block)) {
                return Err(Error::inconsistent("blocks of an account", block.index(), "others"));
            }
        }
        let of_group = |account: &Account| account.cached[group.index()].len();
        let listed: usize = self.accounts.iter().flatten().map(of_group).sum();
        if listed == owned {
            Ok(())
        } else {
            Err(Error::inconsistent("blocks of accounts", owned, listed))
        }
    }
}
