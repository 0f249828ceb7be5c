//! The arena as a run of pages, cut into slabs of a fixed page count that head groups claim.

use crate::error::Error;
use crate::ids::GroupId;

/// Pages, slabs and who has claimed them. The first pages are the null block of every group.
pub(super) struct Arena {
    pages: u32,
    null_pages: u32,
    slab_pages: u32,
    owners: Vec<Option<GroupId>>,
    unclaimed: Vec<u32>,
}

impl Arena {
    /// Cuts an arena of `pages` pages for groups whose blocks have `group_pages` pages each.
    ///
    /// Without a slab size, a single group gets one slab of everything; several groups get slabs
    /// of which there are about 256, each of at least one block of the largest group.
    pub(super) fn new(
        pages: u64,
        slab_pages: Option<u32>,
        group_pages: &[u32],
    ) -> Result<Arena, Error> {
        let largest = group_pages.iter().copied().max().unwrap_or(0);
        if largest == 0 || group_pages.contains(&0) {
            return Err(Error::invalid("head groups", "at least one page each", largest));
        }
        let least = 2 * u64::from(largest);
        if pages < least || pages > i32::MAX as u64 {
            let expected = format!("{least} <= pages <= 2147483647");
            return Err(Error::invalid("arena pages", expected, pages));
        }
        let pages = pages as u32;
        let usable = pages - largest;
        let slab_pages = match slab_pages {
            Some(given) if given < largest || given > usable => {
                let expected = format!("{largest} <= pages <= {usable}");
                return Err(Error::invalid("slab pages", expected, given));
            }
            Some(given) => given,
            None if group_pages.len() == 1 => usable / largest * largest,
            None => largest * (usable / largest / 256).max(1),
        };
        let slabs = usable / slab_pages;
        Ok(Arena {
            pages,
            null_pages: largest,
            slab_pages,
            owners: vec![None; slabs as usize],
            unclaimed: (0..slabs).rev().collect(),
        })
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
        self.owners.len()
    }

    pub(super) fn unclaimed(&self) -> usize {
        self.unclaimed.len()
    }

    pub(super) fn owner(&self, slab: u32) -> Option<GroupId> {
        self.owners[slab as usize]
    }

    /// The page number of a slab's first page.
    pub(super) fn first_page(&self, slab: u32) -> u32 {
        self.null_pages + slab * self.slab_pages
    }

    pub(super) fn claim(&mut self, group: GroupId) -> Option<u32> {
        let slab = self.unclaimed.pop()?;
        self.owners[slab as usize] = Some(group);
        Some(slab)
    }

    pub(super) fn give_back(&mut self, slab: u32) {
        self.owners[slab as usize] = None;
        self.unclaimed.push(slab);
    }
}
