//! The frozen pool (SparseX §4.1, §4.2): which blocks belong to a knowledge base.
//!
//! It owns no memory: frozen blocks are ordinary blocks with one more holder. This file keeps
//! names and wishes; the cache pins and releases.

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashMap;
use serde::Serialize;

use crate::ids::{BlockId, KeyId};

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

/// One block of a frozen segment.
#[derive(Clone)]
pub(crate) struct FrozenBlock {
    pub(crate) key: KeyId,
    pub(crate) content: Box<[u32]>,
    pub(crate) pinned: Option<BlockId>,
}

/// A block that was given up and may come back: segment and place in it.
pub(crate) struct Absent {
    pub(crate) name: (String, String),
    pub(crate) at: usize,
    pub(crate) key: KeyId,
    pub(crate) content: Box<[u32]>,
}

struct Entry {
    tokens: usize,
    blocks: Vec<FrozenBlock>,
}

struct Pin {
    count: u32,
    name: Arc<str>,
}

/// All frozen segments, by (namespace, name).
#[derive(Default)]
pub(crate) struct FrozenPool {
    segments: BTreeMap<(String, String), Entry>,
    pins: HashMap<BlockId, Pin>,
    absent: usize,
}

impl FrozenPool {
    pub(crate) fn is_pinned(&self, block: BlockId) -> bool {
        self.pins.contains_key(&block)
    }

    pub(crate) fn pins(&self, block: BlockId) -> u32 {
        self.pins.get(&block).map_or(0, |pin| pin.count)
    }

    /// The segment that a pinned block belongs to.
    pub(crate) fn name_of(&self, block: BlockId) -> Option<&Arc<str>> {
        self.pins.get(&block).map(|pin| &pin.name)
    }

    /// Distinct pinned blocks.
    pub(crate) fn resident(&self) -> usize {
        self.pins.len()
    }

    /// Blocks that have been given up.
    pub(crate) fn absent(&self) -> usize {
        self.absent
    }

    /// Enters a segment whose blocks are all pinned; returns the blocks of one it replaces.
    pub(crate) fn insert(
        &mut self,
        namespace: &str,
        name: &str,
        tokens: usize,
        blocks: Vec<FrozenBlock>,
    ) -> Vec<BlockId> {
        let shared: Arc<str> = Arc::from(name);
        for block in blocks.iter().filter_map(|block| block.pinned) {
            self.add_pin(block, &shared);
        }
        let key = (namespace.to_owned(), name.to_owned());
        let old = self.segments.insert(key, Entry { tokens, blocks });
        old.map_or_else(Vec::new, |entry| self.drop_pins(&entry))
    }

    /// Removes a segment; returns the blocks to be released, once per pin.
    pub(crate) fn remove(&mut self, namespace: &str, name: &str) -> Option<Vec<BlockId>> {
        let entry = self.segments.remove(&(namespace.to_owned(), name.to_owned()))?;
        Some(self.drop_pins(&entry))
    }

    fn add_pin(&mut self, block: BlockId, name: &Arc<str>) {
        let fresh = || Pin { count: 0, name: Arc::clone(name) };
        self.pins.entry(block).or_insert_with(fresh).count += 1;
    }

    fn drop_pins(&mut self, entry: &Entry) -> Vec<BlockId> {
        let mut released = Vec::new();
        for block in &entry.blocks {
            match block.pinned {
                Some(block) => {
                    self.drop_pin(block);
                    released.push(block);
                }
                None => self.absent -= 1,
            }
        }
        released
    }

    fn drop_pin(&mut self, block: BlockId) {
        if let Some(pin) = self.pins.get_mut(&block) {
            pin.count -= 1;
            if pin.count == 0 {
                self.pins.remove(&block);
            }
        }
    }

    /// Pinned blocks in a fixed order: by segment, then by place.
    pub(crate) fn pinned_blocks(&self) -> Vec<BlockId> {
        let mut seen = hashbrown::HashSet::new();
        let all = self.segments.values().flat_map(|entry| &entry.blocks);
        all.filter_map(|block| block.pinned).filter(|block| seen.insert(*block)).collect()
    }

    /// Gives blocks up in every segment that has them; returns them once per pin.
    pub(crate) fn give_up(&mut self, blocks: &[BlockId]) -> Vec<BlockId> {
        let given: hashbrown::HashSet<BlockId> = blocks.iter().copied().collect();
        let mut released = Vec::new();
        for entry in self.segments.values_mut() {
            for block in &mut entry.blocks {
                if block.pinned.is_some_and(|pinned| given.contains(&pinned)) {
                    released.extend(block.pinned.take());
                    self.absent += 1;
                }
            }
        }
        for &block in &released {
            self.drop_pin(block);
        }
        released
    }

    /// Blocks that were given up, in the order in which they should come back.
    pub(crate) fn absences(&self) -> Vec<Absent> {
        let mut absences = Vec::with_capacity(self.absent);
        for (name, entry) in &self.segments {
            for (at, block) in entry.blocks.iter().enumerate() {
                if block.pinned.is_none() {
                    absences.push(Absent {
                        name: name.clone(),
                        at,
                        key: block.key,
                        content: block.content.clone(),
                    });
                }
            }
        }
        absences
    }

    /// Notes that an absent block is pinned again.
    pub(crate) fn come_back(&mut self, absent: &Absent, block: BlockId) {
        if let Some(entry) = self.segments.get_mut(&absent.name) {
            entry.blocks[absent.at].pinned = Some(block);
            self.absent -= 1;
            let name: Arc<str> = Arc::from(absent.name.1.as_str());
            self.add_pin(block, &name);
        }
    }

    /// The segments of one namespace, or of all.
    pub(crate) fn list(
        &self,
        namespace: Option<&str>,
        uses: impl Fn(BlockId) -> u32,
    ) -> Vec<FrozenSegment> {
        let wanted = |name: &&(String, String)| namespace.is_none_or(|wanted| name.0 == wanted);
        let segments = self.segments.iter().filter(|(name, _)| wanted(name));
        segments
            .map(|((namespace, name), entry)| {
                let pinned: Vec<_> = entry.blocks.iter().filter_map(|b| b.pinned).collect();
                FrozenSegment {
                    name: name.clone(),
                    namespace: namespace.clone(),
                    tokens: entry.tokens,
                    blocks: entry.blocks.len(),
                    resident_blocks: pinned.len(),
                    references: pinned.iter().map(|&block| u64::from(uses(block))).sum(),
                }
            })
            .collect()
    }
}
