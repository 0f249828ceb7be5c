//! Requests that wait, in order: a line for each kind and namespace.

use std::collections::{BTreeMap, BTreeSet};

use super::request::Tracked;

/// A place in line: rank, then arrival, and who stands there.
pub(super) type Place = (i64, u64, u32);

/// Who waits. Lines of one kind lie together; a line that is empty is gone.
#[derive(Default)]
pub(super) struct Queue {
    lines: BTreeMap<(u32, u32), BTreeSet<Place>>,
    waiting: usize,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    pub(super) fn join(&mut self, slot: u32, request: &Tracked) {
        let line = self.lines.entry((request.kind, request.namespace)).or_default();
        self.waiting += usize::from(line.insert((request.rank, request.order, slot)));
    }

    pub(super) fn leave(&mut self, slot: u32, request: &Tracked) {
        let at = (request.kind, request.namespace);
        let Some(line) = self.lines.get_mut(&at) else { return };
        self.waiting -= usize::from(line.remove(&(request.rank, request.order, slot)));
        if line.is_empty() {
            self.lines.remove(&at);
        }
    }

    /// The first of each namespace that waits for a step of `kind`, those in `passed` left out.
    pub(super) fn heads<'a>(
        &'a self,
        kind: u32,
        passed: &'a [u32],
    ) -> impl Iterator<Item = (u32, Place)> + 'a {
        let lines = self.lines.range((kind, 0)..=(kind, u32::MAX));
        lines.filter_map(|(&(_, namespace), line)| {
            let first = line.iter().find(|(_, _, slot)| !passed.contains(slot))?;
            Some((namespace, *first))
        })
    }

    /// Everybody who waits.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.lines.values().flatten().map(|&(_, _, slot)| slot)
    }
}
