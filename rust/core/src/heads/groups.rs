//! Head groups: the classes of a model, their sizes, and the place of each head.

use std::ops::Range;

use crate::error::Error;
use crate::ids::GroupId;
use crate::shape::KvShape;

use super::classes::{HeadClass, HeadClassMap};
use super::refusal::corrupt;

impl HeadClassMap {
    /// The groups of equal class, and the rank of each head in its group.
    ///
    /// # Errors
    /// `CorruptHeadMap` if the map does not validate or has more than 64 classes.
    pub fn groups(&self) -> Result<HeadGroups, Error> {
        self.validate()?;
        let mut by_place = vec![HeadClass::Full; self.heads.len()];
        for entry in &self.heads {
            let at = entry.layer as usize * self.kv_heads as usize + entry.head as usize;
            by_place[at] = entry.class;
        }
        HeadGroups::from_classes(&by_place, self.kv_heads)
    }
}

/// What a window group keeps: `sink` tokens at the start and the latest `recent`.
///
/// A row at position i sees p ≤ i with p > i − recent or p < sink, as [`crate::ops::Reach`] has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalWindow {
    /// Tokens at the start.
    pub sink: usize,
    /// Latest tokens, the row itself included; at least 1.
    pub recent: usize,
}

impl LocalWindow {
    /// The first position, those of the sink aside, that rows from `row` on see.
    #[must_use]
    pub fn first(self, row: usize) -> usize {
        (row + 1).saturating_sub(self.recent)
    }

    /// Whether rows from `row` on see any of these positions.
    #[must_use]
    pub fn sees(self, row: usize, span: &Range<usize>) -> bool {
        span.start < self.sink || span.end > self.first(row)
    }

    /// The blocks of `page` tokens that it takes at most to keep what `chunk` rows in a run see and
    /// write, wherever they begin.
    #[must_use]
    pub fn blocks(self, page: usize, chunk: usize) -> usize {
        let run = (self.recent + chunk).saturating_sub(2).div_ceil(page) + 1;
        self.sink.div_ceil(page) + run
    }
}

/// The head groups of a model: classes, sizes, and the place of each head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadGroups {
    kv_heads: u32,
    classes: Vec<HeadClass>,
    pages: Vec<u32>,
    place: Vec<(GroupId, u32)>,
}

impl HeadGroups {
    /// One group that holds every head: rank = layer·G + head.
    #[must_use]
    pub fn single(shape: &KvShape) -> HeadGroups {
        let n = shape.pages_per_token_span();
        HeadGroups {
            kv_heads: shape.kv_heads(),
            classes: vec![HeadClass::Full],
            pages: vec![n],
            place: (0..n).map(|rank| (GroupId(0), rank)).collect(),
        }
    }

    pub(super) fn from_classes(by_place: &[HeadClass], kv_heads: u32) -> Result<HeadGroups, Error> {
        let mut classes = by_place.to_vec();
        classes.sort_unstable();
        classes.dedup();
        if classes.len() > 64 {
            return Err(corrupt("head map classes", "at most 64 distinct classes", classes.len()));
        }
        let mut pages = vec![0u32; classes.len()];
        let mut place = Vec::with_capacity(by_place.len());
        for class in by_place {
            let group = classes.partition_point(|other| other < class);
            place.push((GroupId(group as u8), pages[group]));
            pages[group] += 1;
        }
        Ok(HeadGroups { kv_heads, classes, pages, place })
    }

    /// The number of groups.
    #[must_use]
    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Never true: every model has a head.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// The class of a group.
    #[must_use]
    pub fn class(&self, group: GroupId) -> HeadClass {
        self.classes[group.index()]
    }

    /// What a group keeps; `None` for all tokens.
    #[must_use]
    pub fn window(&self, group: GroupId) -> Option<LocalWindow> {
        match self.class(group) {
            HeadClass::Window { sink, recent } => {
                Some(LocalWindow { sink: sink as usize, recent: recent as usize })
            }
            HeadClass::Full | HeadClass::TopK { .. } => None,
        }
    }

    /// What each group keeps, in order.
    #[must_use]
    pub fn windows(&self) -> Vec<Option<LocalWindow>> {
        (0..self.len()).map(|group| self.window(GroupId(group as u8))).collect()
    }

    /// Pages of one block of each group.
    #[must_use]
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// The group of (layer, KV head) and its rank there, layer-major.
    ///
    /// # Errors
    /// `OutOfRange` if the model has no such head.
    pub fn rank(&self, layer: u32, head: u32) -> Result<(GroupId, u32), Error> {
        let at = u64::from(layer) * u64::from(self.kv_heads) + u64::from(head);
        if head >= self.kv_heads || at >= self.place.len() as u64 {
            let expected = format!("layer < {} and head < {}", self.layers(), self.kv_heads);
            return Err(Error::out_of_range("head", expected, format!("({layer}, {head})")));
        }
        Ok(self.place[at as usize])
    }

    fn layers(&self) -> usize {
        self.place.len() / self.kv_heads as usize
    }

    /// What the heads of a layer read, as [`crate::ops::Reach`] wants it: `[table, rank, window,
    /// sink]` a KV head, where table r is that of group r.
    ///
    /// # Errors
    /// `OutOfRange` if the model has no such layer.
    pub fn head_rows(&self, layer: u32) -> Result<Vec<[i32; 4]>, Error> {
        let heads = self.kv_heads as usize;
        let places = self.place.chunks_exact(heads).nth(layer as usize).ok_or_else(|| {
            Error::out_of_range("layer", format!("layer < {}", self.layers()), layer)
        })?;
        let row = |&(group, rank): &(GroupId, u32)| {
            let (window, sink) =
                self.window(group).map_or((0, 0), |window| (window.recent, window.sink));
            let row = [usize::from(group.0), rank as usize, window, sink];
            row.map(|number| i32::try_from(number).unwrap_or(i32::MAX))
        };
        Ok(places.iter().map(row).collect())
    }

    /// The layer of each page of a block of a group, in order.
    ///
    /// # Errors
    /// `OutOfRange` if there is no such group.
    pub fn page_layers(&self, group: GroupId) -> Result<Vec<i32>, Error> {
        if group.index() >= self.len() {
            let expected = format!("group < {}", self.len());
            return Err(Error::out_of_range("head group", expected, group.0));
        }
        let places = self.place.iter().enumerate();
        let inside = places.filter(|(_, place)| place.0 == group);
        Ok(inside.map(|(at, _)| (at / self.kv_heads as usize) as i32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_sees_what_its_mask_shows() {
        for (sink, recent) in [(0, 1), (3, 1), (4, 8), (9, 5)] {
            let window = LocalWindow { sink, recent };
            for row in 0..30 {
                let seen = |p: usize| (row..40).any(|i| p <= i && (p + recent > i || p < sink));
                for start in 0..30 {
                    let span = start..start + 4;
                    assert_eq!(window.sees(row, &span), span.clone().any(seen), "{row} {start}");
                }
            }
        }
    }

    #[test]
    fn the_blocks_of_a_chunk_always_suffice() {
        for (sink, recent, chunk, page) in [(0, 1, 1, 4), (3, 9, 5, 4), (8, 8, 8, 4), (1, 7, 2, 3)]
        {
            let window = LocalWindow { sink, recent };
            let needed = |row: usize| {
                let end = (row + chunk).div_ceil(page);
                (0..end).filter(|b| window.sees(row, &(b * page..(b + 1) * page))).count()
            };
            let most = (0..100).map(needed).max().unwrap();
            assert!((most..=most + 1).contains(&window.blocks(page, chunk)));
        }
    }
}
