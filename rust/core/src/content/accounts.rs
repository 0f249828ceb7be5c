//! Whose content is: that of a namespace with a quota is on the namespace's account.

use crate::error::Error;
use crate::ids::{AccountId, BlockId};

use super::ids::ContentId;
use super::index::Index;

impl Index {
    /// The account of a namespace, if it has a quota.
    pub(crate) fn account(&self, namespace: &str) -> Option<AccountId> {
        self.scopes.account(namespace)
    }

    /// All namespaces that have a quota, by name.
    pub(crate) fn accounts(&self) -> impl Iterator<Item = (&str, AccountId)> {
        self.scopes.accounts().iter().map(|(namespace, &account)| (namespace.as_str(), account))
    }

    /// Whether anybody has a quota.
    pub(crate) fn has_accounts(&self) -> bool {
        !self.scopes.accounts().is_empty()
    }

    /// The number that the next account would have.
    ///
    /// # Errors
    /// `InvalidArgument` if there are as many as can be.
    pub(crate) fn free_account(&self) -> Result<AccountId, Error> {
        let most = usize::from(u16::MAX) + 1;
        let refused = || Error::invalid("quotas", format!("at most {most} of them"), most + 1);
        self.scopes.free_account().ok_or_else(refused)
    }

    /// Gives a namespace that has none the account of [`Self::free_account`], or takes its account
    /// away.
    pub(crate) fn set_account(&mut self, namespace: &str, account: Option<AccountId>) {
        self.scopes.set_account(namespace, account);
    }

    /// The account that pays for the content of a block: that of the namespace in which it is found
    /// as a segment, or else of the one in which it is a prefix.
    pub(crate) fn account_of(&self, block: BlockId) -> Option<AccountId> {
        let node = self.nodes.get(self.content_of(block)?);
        let scope = match (node.in_content, node.in_prefix) {
            (true, _) => node.content_scope,
            (false, true) => node.prefix_scope,
            (false, false) => return None,
        };
        self.scopes.get(scope).account
    }

    /// All content that can be found.
    pub(crate) fn members(&self) -> impl Iterator<Item = ContentId> + '_ {
        self.nodes.ids().filter(|&content| self.nodes.is_member(content))
    }
}
