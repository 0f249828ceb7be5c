//! The frozen pool (SparseX §4.1, §4.2): which blocks belong to a knowledge base.
//!
//! It owns no memory: frozen blocks are ordinary blocks with one more holder a pin. This file keeps
//! names and wishes; the cache pins and releases.
//!
//! A block of a document is known by its text and by everything before it in the document, since
//! its KV depends on both. One that was given up comes back if a block of the same text after the
//! same text is cached, wherever that lies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hashbrown::HashMap;
use serde::Serialize;

use crate::ids::{AccountId, ScopeId};

use super::charges::Charges;
use super::hash::Digest;
use super::ids::{ContentId, DocumentBlock};

/// A knowledge-base entry, as listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FrozenSegment {
    /// Its name, unique in the namespace.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its tokens.
    pub tokens: usize,
    /// Blocks it consists of.
    pub blocks: usize,
    /// Of these, blocks that are pinned now.
    pub resident_blocks: usize,
    /// Hits of the resident blocks.
    pub references: u64,
}

/// What a block of a document is known by.
pub(crate) struct BlockText {
    pub(crate) scope: ScopeId,
    pub(crate) content: Box<[u32]>,
    /// The chained digest of all text before it; none where what was frozen is no exact prefix of
    /// its request: then any block of this content will do.
    pub(crate) before: Option<Digest>,
    /// A digest of all this, by which blocks that are entered are looked for.
    pub(crate) digest: u64,
}

/// Where the KV of a document's block is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Residence {
    Pinned(ContentId),
    /// Given up or entered again: cached, as far as is known.
    Waiting,
    /// Given up, and beyond what its namespace may pin.
    Parked,
    /// Looked for and not found: it has to be computed again.
    Lost,
}

struct Frozen {
    text: BlockText,
    residence: Residence,
}

struct Entry {
    namespace: String,
    /// That of the namespace, if it has a quota.
    account: Option<AccountId>,
    name: Arc<str>,
    tokens: usize,
    blocks: Vec<Frozen>,
}

/// What is to be done after an entry was removed.
#[derive(Default)]
pub(crate) struct Removed {
    /// Blocks to be released, once per pin.
    pub(crate) released: Vec<ContentId>,
    /// Of these, blocks that nobody pins any more.
    pub(crate) unpinned: Vec<ContentId>,
    /// Blocks that were given up: what they were known by.
    pub(crate) absent: Vec<BlockText>,
    /// The namespace of each block.
    pub(crate) scopes: Vec<ScopeId>,
}

/// All frozen segments.
#[derive(Default)]
pub(crate) struct FrozenPool {
    numbers: BTreeMap<(String, String), u64>,
    entries: BTreeMap<u64, Entry>,
    next: u64,
    pins: HashMap<ContentId, Vec<DocumentBlock>>,
    waiting: BTreeSet<DocumentBlock>,
    lost: HashMap<u64, Vec<DocumentBlock>>,
    absent: usize,
    charges: Charges,
}

impl FrozenPool {
    pub(crate) fn is_pinned(&self, block: ContentId) -> bool {
        self.pins.contains_key(&block)
    }

    pub(crate) fn pins(&self, block: ContentId) -> u32 {
        self.pins.get(&block).map_or(0, |places| places.len() as u32)
    }

    /// The segments that a pinned block belongs to, the oldest pin first.
    pub(crate) fn names_of(&self, block: ContentId) -> impl Iterator<Item = &Arc<str>> {
        let places = self.pins.get(&block).map_or(&[][..], Vec::as_slice);
        places.iter().map(|(number, _)| &self.entries[number].name)
    }

    /// Distinct pinned blocks.
    pub(crate) fn resident(&self) -> usize {
        self.pins.len()
    }

    /// Blocks that have been given up.
    pub(crate) fn absent(&self) -> usize {
        self.absent
    }

    /// Pinned blocks that nobody but these segments pins, each given by namespace and name, other
    /// than those in `kept`.
    pub(crate) fn alone(&self, segments: &[(&str, &str)], kept: &[ContentId]) -> usize {
        let number = |&(namespace, name): &(&str, &str)| {
            self.numbers.get(&(namespace.to_owned(), name.to_owned())).copied()
        };
        let numbers: BTreeSet<u64> = segments.iter().filter_map(number).collect();
        if numbers.is_empty() {
            return 0;
        }
        let mut kept = kept.to_vec();
        kept.sort_unstable();
        let theirs = |places: &[DocumentBlock]| places.iter().all(|at| numbers.contains(&at.0));
        let own = self.pins.iter().filter(|(_, places)| theirs(places));
        own.filter(|(block, _)| kept.binary_search(block).is_err()).count()
    }

    /// Enters a segment whose blocks are all pinned; says what became of one that it replaces.
    pub(crate) fn insert(
        &mut self,
        (namespace, name): (&str, &str),
        account: Option<AccountId>,
        tokens: usize,
        blocks: Vec<(BlockText, ContentId)>,
    ) -> Removed {
        let number = self.next;
        self.next += 1;
        let pinned: Vec<ContentId> = blocks.iter().map(|&(_, block)| block).collect();
        let entered = |(text, block)| Frozen { text, residence: Residence::Pinned(block) };
        let entry = Entry {
            namespace: namespace.to_owned(),
            account,
            name: Arc::from(name),
            tokens,
            blocks: blocks.into_iter().map(entered).collect(),
        };
        self.entries.insert(number, entry);
        for (at, block) in (0..).zip(pinned) {
            self.add_pin(block, (number, at));
        }
        let named = (namespace.to_owned(), name.to_owned());
        let old = self.numbers.insert(named, number);
        old.map_or_else(Removed::default, |old| self.take_out(old))
    }

    /// Removes a segment.
    pub(crate) fn remove(&mut self, namespace: &str, name: &str) -> Option<Removed> {
        let number = self.numbers.remove(&(namespace.to_owned(), name.to_owned()))?;
        Some(self.take_out(number))
    }

    fn take_out(&mut self, number: u64) -> Removed {
        let mut removed = Removed::default();
        let Some(entry) = self.entries.get_mut(&number) else { return removed };
        for (at, Frozen { text, residence }) in (0..).zip(std::mem::take(&mut entry.blocks)) {
            let place = (number, at);
            removed.scopes.push(text.scope);
            match residence {
                Residence::Pinned(block) => {
                    removed.released.push(block);
                    if self.drop_pin(block, place) {
                        removed.unpinned.push(block);
                    }
                    continue;
                }
                Residence::Waiting => drop(self.waiting.remove(&place)),
                Residence::Parked => self.charges.forget(self.account_of(place), place),
                Residence::Lost => self.stop_looking(text.digest, place),
            }
            self.absent -= 1;
            removed.absent.push(text);
        }
        self.entries.remove(&number);
        removed
    }

    /// Adds one pin, for which the namespace of the entry pays unless it pins the block already.
    fn add_pin(&mut self, block: ContentId, place: DocumentBlock) {
        if let Some(account) = self.account_of(place).filter(|&of| !self.is_charged(block, of)) {
            self.charges.add(account);
        }
        self.pins.entry(block).or_default().push(place);
    }

    /// Removes one pin; whether it was the last of the block.
    fn drop_pin(&mut self, block: ContentId, place: DocumentBlock) -> bool {
        let Some(places) = self.pins.get_mut(&block) else { return false };
        places.retain(|&other| other != place);
        let last = places.is_empty();
        if last {
            self.pins.remove(&block);
        }
        if let Some(account) = self.account_of(place).filter(|&of| !self.is_charged(block, of)) {
            self.charges.take(account);
            self.unpark(account);
        }
        last
    }

    fn account_of(&self, (number, _): DocumentBlock) -> Option<AccountId> {
        self.entries.get(&number)?.account
    }

    /// Whether an entry of this account's namespace pins a block.
    fn is_charged(&self, block: ContentId, account: AccountId) -> bool {
        let places = self.pins.get(&block).map_or(&[][..], Vec::as_slice);
        places.iter().any(|&place| self.account_of(place) == Some(account))
    }

    /// Lets the next block of an account that was beyond its quota wait to come back, if there is
    /// room for it.
    fn unpark(&mut self, account: AccountId) {
        if let Some(place) = self.charges.next_parked(account) {
            self.wait(place);
        }
    }

    fn wait(&mut self, place: DocumentBlock) {
        if let Some(frozen) = self.at(place) {
            frozen.residence = Residence::Waiting;
            self.waiting.insert(place);
        }
    }

    fn stop_looking(&mut self, digest: u64, place: DocumentBlock) {
        if let Some(places) = self.lost.get_mut(&digest) {
            places.retain(|&other| other != place);
            if places.is_empty() {
                self.lost.remove(&digest);
            }
        }
    }

    fn at(&mut self, (number, at): DocumentBlock) -> Option<&mut Frozen> {
        self.entries.get_mut(&number)?.blocks.get_mut(at as usize)
    }

    /// All pinned contents, in no particular order.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = ContentId> {
        self.pins.keys().copied()
    }

    /// The number of the next entry.
    pub(crate) fn next_number(&self) -> u64 {
        self.next
    }

    /// Gives a block up in every segment that has it; says where. It waits to come back.
    pub(crate) fn give_up(&mut self, block: ContentId) -> Vec<DocumentBlock> {
        let places = self.pins.get(&block).cloned().unwrap_or_default();
        places.iter().for_each(|&place| self.let_go(place, block));
        places
    }

    /// The same for the entries of one account, beyond whose quota the block is.
    pub(crate) fn give_up_of(&mut self, account: AccountId, block: ContentId) -> usize {
        let places = self.pins.get(&block).cloned().unwrap_or_default();
        let its = |&&place: &&DocumentBlock| self.account_of(place) == Some(account);
        let places: Vec<DocumentBlock> = places.iter().filter(its).copied().collect();
        places.iter().for_each(|&place| self.let_go(place, block));
        places.len()
    }

    /// Undoes [`Self::come_back`].
    pub(crate) fn let_go(&mut self, place: DocumentBlock, block: ContentId) {
        self.drop_pin(block, place);
        self.wait(place);
        self.absent += 1;
    }

    /// The next block that should come back: by age of the segment, then by place.
    pub(crate) fn next_waiting(&self) -> Option<(DocumentBlock, &BlockText)> {
        let &(number, at) = self.waiting.first()?;
        Some(((number, at), &self.entries[&number].blocks[at as usize].text))
    }

    /// Notes that a waiting block is pinned again.
    pub(crate) fn come_back(&mut self, place: DocumentBlock, block: ContentId) {
        self.waiting.remove(&place);
        if let Some(frozen) = self.at(place) {
            frozen.residence = Residence::Pinned(block);
            self.absent -= 1;
            self.add_pin(block, place);
        }
    }

    /// Whether the quota of a waiting block's namespace has room for it in this content.
    pub(crate) fn may_come_back(&self, place: DocumentBlock, block: ContentId) -> bool {
        let of = self.account_of(place);
        of.is_none_or(|of| self.charges.room(of) > 0 || self.is_charged(block, of))
    }

    /// Notes that a waiting block is beyond the quota of its namespace.
    pub(crate) fn park(&mut self, place: DocumentBlock) {
        let Some(account) = self.account_of(place) else { return };
        self.waiting.remove(&place);
        if let Some(frozen) = self.at(place) {
            frozen.residence = Residence::Parked;
            self.charges.park(account, place);
        }
    }

    /// Gives the entries of a namespace an account with a quota, or changes the quota, or takes the
    /// account away.
    pub(crate) fn set_quota(&mut self, namespace: &str, account: AccountId, quota: Option<usize>) {
        for place in self.charges.set(account, quota) {
            self.wait(place);
        }
        let its = self.entries.values_mut().filter(|entry| entry.namespace == namespace);
        its.for_each(|entry| entry.account = quota.map(|_| account));
        let charged = self.charged(account).count();
        self.charges.set_pinned(account, charged);
    }

    /// The distinct blocks that the entries of an account pin, in no particular order.
    pub(crate) fn charged(&self, account: AccountId) -> impl Iterator<Item = ContentId> {
        self.pins.keys().copied().filter(move |&block| self.is_charged(block, account))
    }

    /// How many more blocks an account may pin when an entry is replaced by one of these blocks,
    /// and how many of them it would have to.
    pub(crate) fn quota_room(
        &self,
        account: AccountId,
        (namespace, name): (&str, &str),
        blocks: impl Iterator<Item = ContentId>,
    ) -> (usize, usize) {
        let old = self.numbers.get(&(namespace.to_owned(), name.to_owned())).copied();
        let by_others = |block: &ContentId| {
            let places = self.pins.get(block).map_or(&[][..], Vec::as_slice);
            let mut others = places.iter().filter(|place| Some(place.0) != old);
            others.any(|&place| self.account_of(place) == Some(account))
        };
        let distinct = |blocks: &mut dyn Iterator<Item = ContentId>| -> usize {
            blocks.filter(|block| !by_others(block)).collect::<BTreeSet<_>>().len()
        };
        let entry = old.and_then(|old| self.entries.get(&old));
        let mut replaced = entry.into_iter().flat_map(Entry::pinned);
        let room = self.charges.room(account) + distinct(&mut replaced);
        (room, distinct(&mut { blocks }))
    }

    /// What each account whose pins have changed may have cached beside them.
    pub(crate) fn take_allowed(&mut self) -> Vec<(AccountId, usize)> {
        self.charges.take_allowed()
    }

    /// The quota of an account and the blocks that its namespace pins.
    pub(crate) fn charge(&self, account: AccountId) -> (usize, usize) {
        self.charges.get(account)
    }

    /// Notes that a waiting block is nowhere.
    pub(crate) fn lose(&mut self, place: DocumentBlock) {
        self.waiting.remove(&place);
        if let Some(frozen) = self.at(place) {
            frozen.residence = Residence::Lost;
            let digest = frozen.text.digest;
            self.lost.entry(digest).or_default().push(place);
        }
    }

    /// Whether a block is looked for: only then is it worth while to say what is entered.
    pub(crate) fn is_looking(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Says that text with this digest has been entered: lost blocks that are this text wait.
    pub(crate) fn entered(&mut self, digest: u64, is_it: impl Fn(&BlockText) -> bool) {
        let Some(places) = self.lost.remove(&digest) else { return };
        let mut left = Vec::new();
        for place in places {
            match self.at(place) {
                Some(frozen) if is_it(&frozen.text) => {
                    frozen.residence = Residence::Waiting;
                    self.waiting.insert(place);
                }
                _ => left.push(place),
            }
        }
        if !left.is_empty() {
            self.lost.insert(digest, left);
        }
    }

    /// The segments of one namespace, or of all, by namespace and name.
    pub(crate) fn list(
        &self,
        namespace: Option<&str>,
        uses: impl Fn(ContentId) -> u32,
    ) -> Vec<FrozenSegment> {
        let entries = self.numbers.values().map(|number| &self.entries[number]);
        let wanted = |entry: &&Entry| namespace.is_none_or(|wanted| entry.namespace == wanted);
        entries.filter(wanted).map(|entry| entry.listed(&uses)).collect()
    }

    /// One segment by its name.
    pub(crate) fn find(
        &self,
        namespace: &str,
        name: &str,
        uses: impl Fn(ContentId) -> u32,
    ) -> Option<FrozenSegment> {
        let number = self.numbers.get(&(namespace.to_owned(), name.to_owned()))?;
        Some(self.entries[number].listed(&uses))
    }
}

impl Entry {
    fn pinned(&self) -> impl Iterator<Item = ContentId> {
        self.blocks.iter().filter_map(|frozen| match frozen.residence {
            Residence::Pinned(block) => Some(block),
            _ => None,
        })
    }

    fn listed(&self, uses: &impl Fn(ContentId) -> u32) -> FrozenSegment {
        let pinned: Vec<ContentId> = self.pinned().collect();
        FrozenSegment {
            name: self.name.to_string(),
            namespace: self.namespace.clone(),
            tokens: self.tokens,
            blocks: self.blocks.len(),
            resident_blocks: pinned.len(),
            references: pinned.iter().map(|&content| u64::from(uses(content))).sum(),
        }
    }
}
