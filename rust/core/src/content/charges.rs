//! What namespaces with a quota have pinned, and what of theirs waits for the quota.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::AccountId;

use super::ids::DocumentBlock;

#[derive(Default)]
struct Charge {
    quota: usize,
    /// Distinct blocks that the namespace's documents pin.
    pinned: usize,
    /// Blocks that were given up and for which the quota has no room.
    parked: BTreeSet<DocumentBlock>,
}

impl Charge {
    fn room(&self) -> usize {
        self.quota.saturating_sub(self.pinned)
    }
}

/// The charges of all accounts.
#[derive(Default)]
pub(super) struct Charges {
    accounts: BTreeMap<AccountId, Charge>,
    changed: BTreeSet<AccountId>,
}

impl Charges {
    /// Sets the quota of an account, which is opened or closed by it. Returns what was parked.
    pub(super) fn set(
        &mut self,
        account: AccountId,
        quota: Option<usize>,
    ) -> BTreeSet<DocumentBlock> {
        let Some(quota) = quota else {
            self.changed.remove(&account);
            return self.accounts.remove(&account).unwrap_or_default().parked;
        };
        let charge = self.accounts.entry(account).or_default();
        charge.quota = quota;
        self.changed.insert(account);
        std::mem::take(&mut charge.parked)
    }

    fn change(&mut self, account: AccountId, by: impl FnOnce(&mut Charge)) {
        if let Some(charge) = self.accounts.get_mut(&account) {
            by(charge);
            self.changed.insert(account);
        }
    }

    pub(super) fn set_pinned(&mut self, account: AccountId, pinned: usize) {
        self.change(account, |charge| charge.pinned = pinned);
    }

    pub(super) fn add(&mut self, account: AccountId) {
        self.change(account, |charge| charge.pinned += 1);
    }

    pub(super) fn take(&mut self, account: AccountId) {
        self.change(account, |charge| charge.pinned -= 1);
    }

    /// Blocks that an account may still pin.
    pub(super) fn room(&self, account: AccountId) -> usize {
        self.accounts.get(&account).map_or(usize::MAX, Charge::room)
    }

    /// The quota of an account and the blocks that are pinned.
    pub(super) fn get(&self, account: AccountId) -> (usize, usize) {
        self.accounts.get(&account).map_or((0, 0), |charge| (charge.quota, charge.pinned))
    }

    pub(super) fn park(&mut self, account: AccountId, place: DocumentBlock) {
        self.change(account, |charge| {
            charge.parked.insert(place);
        });
    }

    /// Takes out a block of a document that is removed.
    pub(super) fn forget(&mut self, account: Option<AccountId>, place: DocumentBlock) {
        if let Some(account) = account {
            self.change(account, |charge| {
                charge.parked.remove(&place);
            });
        }
    }

    /// Takes out the first block that is parked, if the account may pin one.
    pub(super) fn next_parked(&mut self, account: AccountId) -> Option<DocumentBlock> {
        let charge = self.accounts.get_mut(&account).filter(|charge| charge.room() > 0)?;
        charge.parked.pop_first()
    }

    /// What each account that has changed may have cached beside what it pins.
    pub(super) fn take_allowed(&mut self) -> Vec<(AccountId, usize)> {
        if self.changed.is_empty() {
            return Vec::new();
        }
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().map(|account| (account, self.room(account))).collect()
    }
}
