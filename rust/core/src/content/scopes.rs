//! Namespaces: each pair of namespace and RoPE regime gets a number and its root digests for as
//! long as anything is of it: a request, a block that is cached, or one that a document waits for.
//!
//! A namespace with a quota has an account, in all its regimes and for as long as it has the quota.

use std::collections::BTreeMap;

use hashbrown::{Equivalent, HashMap};

use crate::ids::{AccountId, ScopeId};

use super::hash::{BlockHasher, Digest};
use super::ids::ContentId;

#[derive(Clone, PartialEq, Eq, Hash)]
struct Name(String, u64);

#[derive(Hash)]
struct NameRef<'a>(&'a str, u64);

impl Equivalent<Name> for NameRef<'_> {
    /// The namespace of nobody is not compared byte for byte: a `memcmp` by masked loads, as libc
    /// has it for AVX-512, takes some 200 ns for no bytes at an address where no page is.
    fn equivalent(&self, name: &Name) -> bool {
        let same_length = self.0.len() == name.0.len();
        same_length && self.1 == name.1 && (self.0.is_empty() || self.0 == name.0)
    }
}

/// What belongs to one namespace and regime.
pub(super) struct Scope {
    /// Parent digest of the first block of a prompt.
    pub(super) prefix: Digest,
    /// Parent digest of every virtual block.
    pub(super) content: Digest,
    /// The first block of every cached prompt: head of the children list of the root.
    pub(super) first_child: ContentId,
    /// That of its namespace, if it has a quota.
    pub(super) account: Option<AccountId>,
    name: Name,
    /// What is of it; at 0 the number goes to the next namespace that is new.
    holders: usize,
}

/// All namespaces that anything is of.
pub(super) struct Scopes {
    hasher: BlockHasher,
    model: String,
    by_name: HashMap<Name, ScopeId>,
    scopes: Vec<Scope>,
    free: Vec<ScopeId>,
    accounts: BTreeMap<String, AccountId>,
    free_accounts: Vec<AccountId>,
}

impl Scopes {
    pub(super) fn new(hasher: BlockHasher, model: &str) -> Scopes {
        let (model, by_name) = (model.to_owned(), HashMap::new());
        let (scopes, free) = (Vec::new(), Vec::new());
        let (accounts, free_accounts) = (BTreeMap::new(), Vec::new());
        Scopes { hasher, model, by_name, scopes, free, accounts, free_accounts }
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn find(&self, namespace: &str, regime: u64) -> Option<ScopeId> {
        self.by_name.get(&NameRef(namespace, regime)).copied()
    }

    /// The number of a namespace and regime, with one more holder.
    pub(super) fn acquire(&mut self, namespace: &str, regime: u64) -> ScopeId {
        let known = self.find(namespace, regime);
        let id = known.unwrap_or_else(|| self.enter(Name(namespace.to_owned(), regime)));
        self.hold(id);
        id
    }

    fn enter(&mut self, name: Name) -> ScopeId {
        let content_domain = format!("virtual\0{}", self.model);
        let scope = Scope {
            prefix: self.hasher.root(&name.0, name.1, &self.model),
            content: self.hasher.root(&name.0, name.1, &content_domain),
            first_child: ContentId::NONE,
            account: self.account(&name.0),
            name: name.clone(),
            holders: 0,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.scopes[id.0 as usize] = scope;
                id
            }
            None => {
                self.scopes.push(scope);
                ScopeId((self.scopes.len() - 1) as u32)
            }
        };
        self.by_name.insert(name, id);
        id
    }

    pub(super) fn hold(&mut self, id: ScopeId) {
        self.get_mut(id).holders += 1;
    }

    /// Removes a holder; the last one takes the namespace with it.
    #[inline]
    pub(super) fn release(&mut self, id: ScopeId) {
        let scope = self.get_mut(id);
        scope.holders -= 1;
        if scope.holders == 0 {
            self.leave(id);
        }
    }

    #[cold]
    fn leave(&mut self, id: ScopeId) {
        let name = std::mem::replace(&mut self.get_mut(id).name, Name(String::new(), 0));
        self.by_name.remove(&name);
        self.free.push(id);
    }

    pub(super) fn namespace(&self, id: ScopeId) -> &str {
        &self.get(id).name.0
    }

    pub(super) fn holders(&self, id: ScopeId) -> usize {
        self.get(id).holders
    }

    pub(super) fn get(&self, id: ScopeId) -> &Scope {
        &self.scopes[id.0 as usize]
    }

    pub(super) fn get_mut(&mut self, id: ScopeId) -> &mut Scope {
        &mut self.scopes[id.0 as usize]
    }

    /// The account of a namespace, if it has a quota.
    pub(super) fn account(&self, namespace: &str) -> Option<AccountId> {
        self.accounts.get(namespace).copied()
    }

    /// All namespaces that have a quota.
    pub(super) fn accounts(&self) -> &BTreeMap<String, AccountId> {
        &self.accounts
    }

    /// The number that the next account would have; none if there are as many as can be.
    pub(super) fn free_account(&self) -> Option<AccountId> {
        let again = self.free_accounts.last().copied();
        again.or_else(|| u16::try_from(self.accounts.len()).ok().map(AccountId))
    }

    /// Gives a namespace that has none the account of [`Self::free_account`], or takes its account
    /// away.
    pub(super) fn set_account(&mut self, namespace: &str, account: Option<AccountId>) {
        if let Some(account) = account {
            self.accounts.insert(namespace.to_owned(), account);
            self.free_accounts.pop();
        } else {
            self.free_accounts.extend(self.accounts.remove(namespace));
        }
        let its = self.scopes.iter_mut().filter(|scope| scope.name.0 == namespace);
        its.for_each(|scope| scope.account = account);
    }

    /// All numbers, those that nothing is of included.
    pub(super) fn ids(&self) -> impl Iterator<Item = ScopeId> {
        (0..self.scopes.len() as u32).map(ScopeId)
    }
}
