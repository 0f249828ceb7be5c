//! What of a request may lie in the host's memory, and what it takes of the device then.

use hashbrown::HashMap;

use super::request::RequestId;
use super::room::Shortage;

/// The host's memory for blocks of one head group, whose rows read few of them (FlexiCache, §3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeGroup {
    /// The head group, by its number.
    pub group: usize,
    /// Blocks of the device that a request holds in place of all that lie at home.
    pub slots: usize,
    /// Blocks of the device that it holds beside these at most, which have not gone home yet.
    pub newest: usize,
    /// Blocks of the host's memory.
    pub total: usize,
}

impl HomeGroup {
    /// Of so many blocks of a request those that are on the device at a time, at most.
    #[must_use]
    pub fn working_set(&self, blocks: usize) -> usize {
        blocks.min(self.slots + self.newest)
    }

    /// Of so many blocks of a request those that lie at home then: never the newest one.
    #[must_use]
    pub fn away(&self, blocks: usize) -> usize {
        if blocks > self.slots + self.newest { blocks - 1 } else { 0 }
    }
}

/// What a request was promised whose prompt is computed in parts.
#[derive(Clone, Debug, Default)]
struct Promise {
    /// Pages of the device that its tokens would take beside those that are counted for it.
    spared: usize,
    /// Blocks at home by head group, and pages of the device.
    homes: Vec<usize>,
    pages: usize,
    /// What it holds of these by now.
    held_homes: Vec<usize>,
    held_pages: usize,
    /// Whether its prompt is still being computed: it will take the rest.
    fills: bool,
}

/// The host's memory of head groups, and who was promised some of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Homes {
    groups: Vec<HomeGroup>,
    free: Vec<usize>,
    promises: HashMap<RequestId, Promise>,
}

impl Homes {
    pub(super) fn new(groups: &[HomeGroup]) -> Homes {
        let free = groups.iter().map(|home| home.total).collect();
        Homes { groups: groups.to_vec(), free, promises: HashMap::new() }
    }

    pub(super) fn of(&self, group: usize) -> Option<&HomeGroup> {
        self.groups.iter().find(|home| home.group == group)
    }

    pub(super) fn groups(&self) -> &[HomeGroup] {
        &self.groups
    }

    /// Blocks that each could give now; what was promised and not taken yet is left out.
    pub(super) fn tell_free(&mut self, blocks: &[usize]) {
        for (number, (free, &told)) in self.free.iter_mut().zip(blocks).enumerate() {
            let unmet: usize = self
                .promises
                .values()
                .filter(|promise| promise.fills)
                .map(|promise| promise.homes[number].saturating_sub(promise.held_homes[number]))
                .sum();
            *free = told.min(self.groups[number].total).saturating_sub(unmet);
        }
    }

    /// Pages of the device that were promised and have not been taken yet.
    pub(super) fn unmet_pages(&self) -> usize {
        let unmet = |promise: &Promise| promise.pages.saturating_sub(promise.held_pages);
        self.promises.values().filter(|promise| promise.fills).map(unmet).sum()
    }

    /// Whether so many blocks at home could be given: of an empty memory, or of this one now.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn fits(&self, homes: &[usize], empty: bool) -> Result<(), Shortage> {
        for (number, (&needed, home)) in homes.iter().zip(&self.groups).enumerate() {
            let free = if empty { home.total } else { self.free[number] };
            if needed > free {
                return Err(Shortage { needed, free, at_home: true });
            }
        }
        Ok(())
    }

    /// A request is promised blocks at home and `pages` of the device, and is spared some of these.
    pub(super) fn promise(&mut self, id: RequestId, homes: Vec<usize>, pages: (usize, usize)) {
        for (free, taken) in self.free.iter_mut().zip(&homes) {
            *free -= taken;
        }
        let (pages, spared) = pages;
        let held_homes = vec![0; homes.len()];
        let made = Promise { spared, homes, pages, held_homes, held_pages: 0, fills: true };
        self.promises.insert(id, made);
    }

    /// What a request holds by now of what it was promised.
    pub(super) fn tell_held(&mut self, id: RequestId, pages: usize, homes: &[usize]) {
        if let Some(promise) = self.promises.get_mut(&id) {
            promise.held_pages = pages;
            promise.held_homes.iter_mut().zip(homes).for_each(|(held, &told)| *held = told);
        }
    }

    /// A request has taken all that it will: the pages that it is spared; `None` for one that was
    /// promised nothing at home.
    pub(super) fn filled(&mut self, id: RequestId) -> Option<usize> {
        let promise = self.promises.get_mut(&id)?;
        promise.fills = false;
        Some(promise.spared)
    }

    pub(super) fn is_promised(&self, id: RequestId) -> bool {
        self.promises.contains_key(&id)
    }

    /// Forgets what a request was promised; what it did not take may be had.
    pub(super) fn release(&mut self, id: RequestId) {
        let Some(promise) = self.promises.remove(&id) else { return };
        for (number, free) in self.free.iter_mut().enumerate() {
            *free = (*free + promise.homes[number]).min(self.groups[number].total);
        }
    }
}
