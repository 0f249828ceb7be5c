//! Namespaces: each pair of namespace and RoPE regime gets a number and its root digests.

use hashbrown::{Equivalent, HashMap};

use crate::ids::{BlockId, KeyId};

use super::hash::{BlockHasher, Digest};

#[derive(PartialEq, Eq, Hash)]
struct Name(String, u64);

#[derive(Hash)]
struct NameRef<'a>(&'a str, u64);

impl Equivalent<Name> for NameRef<'_> {
    fn equivalent(&self, name: &Name) -> bool {
        self.0 == name.0 && self.1 == name.1
    }
}

/// What belongs to one namespace and regime.
pub(super) struct Key {
    /// Parent digest of the first block of a prompt.
    pub(super) prefix: Digest,
    /// Parent digest of every virtual block.
    pub(super) content: Digest,
    /// The first block of every cached prompt: head of the children list of the root.
    pub(super) first_child: BlockId,
}

/// All namespaces seen so far.
pub(super) struct Keys {
    hasher: BlockHasher,
    model: String,
    by_name: HashMap<Name, KeyId>,
    keys: Vec<Key>,
}

impl Keys {
    pub(super) fn new(hasher: BlockHasher, model: &str) -> Keys {
        Keys { hasher, model: model.to_owned(), by_name: HashMap::new(), keys: Vec::new() }
    }

    pub(super) fn get(&self, namespace: &str, regime: u64) -> Option<KeyId> {
        self.by_name.get(&NameRef(namespace, regime)).copied()
    }

    pub(super) fn intern(&mut self, namespace: &str, regime: u64) -> KeyId {
        if let Some(key) = self.get(namespace, regime) {
            return key;
        }
        let id = KeyId(self.keys.len() as u32);
        let content_domain = format!("virtual\0{}", self.model);
        self.keys.push(Key {
            prefix: self.hasher.root(namespace, regime, &self.model),
            content: self.hasher.root(namespace, regime, &content_domain),
            first_child: BlockId::NONE,
        });
        self.by_name.insert(Name(namespace.to_owned(), regime), id);
        id
    }

    pub(super) fn key(&self, id: KeyId) -> &Key {
        &self.keys[id.0 as usize]
    }

    pub(super) fn key_mut(&mut self, id: KeyId) -> &mut Key {
        &mut self.keys[id.0 as usize]
    }
}
