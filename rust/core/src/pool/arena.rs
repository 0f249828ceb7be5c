//! The arena as a run of pages, cut into slabs of a fixed page count that head groups claim.

use crate::error::Error;

use super::states::{BlockGroup, GroupKind};

/// Slabs and a number past the last fit 16 bits.
const MOST_SLABS: u32 = u16::MAX as u32;

/// Pages and slabs, and which slabs nobody has claimed. The first pages are the null block of
/// every group.
pub(super) struct Arena {
    pages: u32,
    null_pages: u32,
    slab_pages: u32,
    slabs: u32,
    unclaimed: Vec<u16>,
}

impl Arena {
    /// Cuts an arena of `pages` pages for groups of blocks.
    ///
    /// Without a slab size, a single group gets one slab of everything; several groups get slabs
    /// that waste few pages, see [`slab_size`].
    pub(super) fn new(
        pages: u64,
        slab_pages: Option<u32>,
        groups: &[BlockGroup],
    ) -> Result<Arena, Error> {
        let largest = groups.iter().map(|group| group.pages).max().unwrap_or(0);
        if largest == 0 || groups.iter().any(|group| group.pages == 0) {
            return Err(Error::invalid("head groups", "at least one page each", largest));
        }
        let least = 2 * u64::from(largest);
        if pages < least || pages > i32::MAX as u64 {
            let expected = format!("{least} <= pages <= 2147483647");
            return Err(Error::invalid("arena pages", expected, pages));
        }
        let pages = pages as u32;
        let usable = pages - largest;
        let smallest = largest.max(usable.div_ceil(MOST_SLABS));
        let slab_pages = match slab_pages {
            Some(given) if given < smallest || given > usable => {
                let expected = format!("{smallest} <= pages <= {usable}");
                return Err(Error::invalid("slab pages", expected, given));
            }
            Some(given) => given,
            None if groups.len() == 1 => usable / largest * largest,
            None => slab_size(usable, largest, groups),
        };
        let slabs = usable / slab_pages;
        Ok(Arena {
            pages,
            null_pages: largest,
            slab_pages,
            slabs,
            unclaimed: (0..slabs).rev().map(|slab| slab as u16).collect(),
        })
    }

    /// Pages of the smallest arena found in which every group has `blocks` blocks at once, beside
    /// the null block; single pages aside, of which there may be none.
    pub(super) fn pages_for(groups: &[BlockGroup], blocks: u64) -> Result<u64, Error> {
        let sized = || groups.iter().filter(|group| group.kind != GroupKind::SinglePage);
        let block: u64 = sized().map(|group| u64::from(group.pages)).sum();
        let largest = sized().map(|group| u64::from(group.pages)).max().unwrap_or(0);
        let too_many = || {
            let got = format!("{blocks} blocks of {block} pages");
            Error::invalid("arena", "at most 2147483647 pages", got)
        };
        let spread = blocks.checked_mul(block).and_then(|pages| pages.checked_add(largest));
        let mut pages = spread.ok_or_else(too_many)?;
        while pages <= i32::MAX as u64 {
            let arena = Arena::new(pages, None, groups)?;
            let slab = |group: &BlockGroup| u64::from(arena.slab_pages / group.pages);
            let wanted: u64 = sized().map(|group| blocks.div_ceil(slab(group))).sum();
            let missing = wanted.saturating_sub(u64::from(arena.slabs));
            if missing == 0 {
                return Ok(pages);
            }
            pages += missing * u64::from(arena.slab_pages);
        }
        Err(too_many())
    }

    pub(super) fn pages(&self) -> u32 {
        self.pages
    }

    pub(super) fn null_pages(&self) -> u32 {
        self.null_pages
    }

    pub(super) fn slab_pages(&self) -> u32 {
        self.slab_pages
    }

    pub(super) fn slabs(&self) -> usize {
        self.slabs as usize
    }

    pub(super) fn unclaimed(&self) -> usize {
        self.unclaimed.len()
    }

    /// The page number of a slab's first page.
    pub(super) fn first_page(&self, slab: u16) -> u32 {
        self.null_pages + u32::from(slab) * self.slab_pages
    }

    pub(super) fn claim(&mut self) -> Option<u16> {
        self.unclaimed.pop()
    }

    pub(super) fn give_back(&mut self, slab: u16) {
        self.unclaimed.push(slab);
    }
}

/// Pages of a slab: of sizes that make 8 to 256 slabs, the one that wastes the fewest pages. Those
/// are the ones past the last slab, what blocks of a group leave over in each slab, and of each
/// group a few slabs that are not full: windows move on and leave holes.
fn slab_size(usable: u32, largest: u32, groups: &[BlockGroup]) -> u32 {
    const TRIES: u32 = 64;
    let blocks = usable / largest;
    let first = (blocks / 256).max(1);
    let last = (blocks / 8).clamp(first, first + TRIES);
    let wasted = |slab: u32| {
        let left = groups.iter().map(|group| slab % group.pages).max().unwrap_or(0);
        let (slabs, slab_pages) = (u64::from(usable / slab), u64::from(slab));
        u64::from(usable % slab) + slabs * u64::from(left) + 4 * slab_pages * groups.len() as u64
    };
    (first..=last)
        .map(|blocks| blocks * largest)
        .min_by_key(|&slab| wasted(slab))
        .unwrap_or(largest)
}
