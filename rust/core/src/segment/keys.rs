//! Namespaces: each pair of namespace and RoPE regime gets a number and its root digests for as
//! long as anything is of it: a request, a block that is cached, or one that a document waits for.

use hashbrown::{Equivalent, HashMap};

use crate::ids::{BlockId, KeyId};

use super::hash::{BlockHasher, Digest};

#[derive(Clone, PartialEq, Eq, Hash)]
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
    name: Name,
    /// What is of it; at 0 the number goes to the next namespace that is new.
    holders: usize,
}

/// All namespaces that anything is of.
pub(super) struct Keys {
    hasher: BlockHasher,
    model: String,
    by_name: HashMap<Name, KeyId>,
    keys: Vec<Key>,
    free: Vec<KeyId>,
}

impl Keys {
    pub(super) fn new(hasher: BlockHasher, model: &str) -> Keys {
        let (model, by_name) = (model.to_owned(), HashMap::new());
        Keys { hasher, model, by_name, keys: Vec::new(), free: Vec::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn get(&self, namespace: &str, regime: u64) -> Option<KeyId> {
        self.by_name.get(&NameRef(namespace, regime)).copied()
    }

    /// The number of a namespace and regime, with one more holder.
    pub(super) fn acquire(&mut self, namespace: &str, regime: u64) -> KeyId {
        let known = self.get(namespace, regime);
        let id = known.unwrap_or_else(|| self.enter(Name(namespace.to_owned(), regime)));
        self.hold(id);
        id
    }

    fn enter(&mut self, name: Name) -> KeyId {
        let content_domain = format!("virtual\0{}", self.model);
        let key = Key {
            prefix: self.hasher.root(&name.0, name.1, &self.model),
            content: self.hasher.root(&name.0, name.1, &content_domain),
            first_child: BlockId::NONE,
            name: name.clone(),
            holders: 0,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.keys[id.0 as usize] = key;
                id
            }
            None => {
                self.keys.push(key);
                KeyId((self.keys.len() - 1) as u32)
            }
        };
        self.by_name.insert(name, id);
        id
    }

    pub(super) fn hold(&mut self, id: KeyId) {
        self.key_mut(id).holders += 1;
    }

    /// Removes a holder; the last one takes the namespace with it.
    pub(super) fn release(&mut self, id: KeyId) {
        let key = self.key_mut(id);
        key.holders -= 1;
        if key.holders == 0 {
            let name = std::mem::replace(&mut key.name, Name(String::new(), 0));
            self.by_name.remove(&name);
            self.free.push(id);
        }
    }

    pub(super) fn holders(&self, id: KeyId) -> usize {
        self.key(id).holders
    }

    pub(super) fn key(&self, id: KeyId) -> &Key {
        &self.keys[id.0 as usize]
    }

    pub(super) fn key_mut(&mut self, id: KeyId) -> &mut Key {
        &mut self.keys[id.0 as usize]
    }

    /// All numbers, those that nothing is of included.
    pub(super) fn ids(&self) -> impl Iterator<Item = KeyId> {
        (0..self.keys.len() as u32).map(KeyId)
    }
}
