//! All blocks of an arena, and every transition between their states.

use crate::error::Error;
use crate::ids::{AccountId, BlockId, GroupId};
use crate::reserve::{filled, refused, zeroed};

use super::arena::Arena;
use super::freed::FreedPages;
use super::order::Order;
use super::pins::Pins;
use super::states::{Block, BlockGroup, BlockState, Evict, Group, GroupCounts, GroupKind, Slab};
use super::victims::{Advice, Eviction};

/// One arena shared by the pools of all head groups.
pub struct Pool {
    pub(super) arena: Arena,
    /// Block numbers a slab spans: the blocks of the smallest group that is indexed.
    pub(super) stride: u32,
    pub(super) slabs: Vec<Slab>,
    pub(super) groups: Vec<Group>,
    pub(super) blocks: Vec<Block>,
    pub(super) order: Order,
    pub(super) pages: Vec<i32>,
    pub(super) pins: Pins,
    /// First numbers of ranges of single pages that are not in use.
    pub(super) single_page_numbers: Vec<u32>,
    forgotten: Vec<BlockId>,
    evictions: u64,
    /// Pages whose blocks went back, where somebody wants to hear of them.
    pub(super) freed: Option<FreedPages>,
}

impl Pool {
    /// Cuts an arena of `arena_pages` pages for groups whose blocks have `group_pages` pages and
    /// are all kept for as long as somebody reads them.
    ///
    /// # Errors
    /// As [`Self::of_groups`].
    pub fn new(
        arena_pages: u64,
        slab_pages: Option<u32>,
        group_pages: &[u32],
    ) -> Result<Pool, Error> {
        let full = |&pages: &u32| BlockGroup { pages, kind: GroupKind::Full };
        let groups: Vec<BlockGroup> = group_pages.iter().map(full).collect();
        Pool::of_groups(arena_pages, slab_pages, &groups)
    }

    /// Cuts an arena of `arena_pages` pages for groups of blocks.
    ///
    /// # Errors
    /// `InvalidArgument` if the arena holds no block beside the null block, does not fit i32 page
    /// numbers, or the slab size does not suit it, `OutOfMemory` where its books find no room.
    pub fn of_groups(
        arena_pages: u64,
        slab_pages: Option<u32>,
        groups: &[BlockGroup],
    ) -> Result<Pool, Error> {
        Pool::of_ordered_groups(arena_pages, slab_pages, groups, Eviction::default())
    }

    /// The same, with a say in which cached blocks go first.
    ///
    /// # Errors
    /// As [`Self::of_groups`].
    pub fn of_ordered_groups(
        arena_pages: u64,
        slab_pages: Option<u32>,
        groups: &[BlockGroup],
        eviction: Eviction,
    ) -> Result<Pool, Error> {
        let arena = Arena::new(arena_pages, slab_pages, groups)?;
        let group = |&BlockGroup { pages, kind }: &BlockGroup| Group {
            pages,
            kind,
            slab_blocks: arena.slab_pages() / pages,
            free: 0,
            cached: 0,
            held: 0,
            total: 0,
        };
        let groups: Vec<Group> = groups.iter().map(group).collect();
        let indexed = groups.iter().filter(|group| group.kind != GroupKind::SinglePage);
        let stride = indexed.map(|group| group.slab_blocks).max().unwrap_or(0);
        let capacity = stride as usize * arena.slabs();
        let mut pool = Pool {
            stride,
            slabs: (0..arena.slabs()).map(|_| Slab::default()).collect(),
            blocks: filled("states of blocks", Block::UNCLAIMED, capacity)?,
            order: Order::new(eviction, capacity, groups.len())?,
            groups,
            pages: zeroed("pages of blocks", capacity)?,
            pins: Pins::default(),
            single_page_numbers: Vec::new(),
            forgotten: Vec::new(),
            evictions: 0,
            freed: None,
            arena,
        };
        if let [group] = &pool.groups[..] {
            let blocks = group.slab_blocks as usize;
            for slab in &mut pool.slabs {
                let room = slab.free.try_reserve_exact(blocks);
                room.map_err(|_| refused::<BlockId>("free blocks", blocks))?;
            }
            while pool.claim_slab(GroupId(0)) {}
        }
        Ok(pool)
    }

    /// Pages of an arena in which every group but that of single pages has `blocks` blocks
    /// at the same time, beside the null block.
    ///
    /// # Errors
    /// `InvalidArgument` if page numbers would not fit an i32, or for a group without pages.
    pub fn pages_for(groups: &[BlockGroup], blocks: u64) -> Result<u64, Error> {
        Arena::pages_for(groups, blocks)
    }

    /// Upper bound of the numbers of blocks that an index may name.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.stride as usize * self.slabs.len()
    }

    /// Number of groups.
    #[must_use]
    pub fn group_count(&self) -> usize {
        self.groups.len()
    }

    /// Arena pages, the null block's and those no slab covers included.
    #[must_use]
    pub fn arena_pages(&self) -> u32 {
        self.arena.pages()
    }

    /// Pages that slabs cover.
    #[must_use]
    pub fn slab_pages_total(&self) -> u64 {
        self.arena.slabs() as u64 * u64::from(self.arena.slab_pages())
    }

    /// Pages of the blocks that are held.
    #[must_use]
    pub fn held_pages(&self) -> u64 {
        self.groups.iter().map(|group| group.held as u64 * u64::from(group.pages)).sum()
    }

    /// The arena page number of a block's first page: its number in every table.
    #[must_use]
    pub fn page(&self, block: BlockId) -> i32 {
        self.pages[block.index()]
    }

    /// The group that a block belongs to.
    #[must_use]
    pub fn group(&self, block: BlockId) -> GroupId {
        self.blocks[block.index()].group
    }

    /// The state of a block.
    #[must_use]
    pub fn state(&self, block: BlockId) -> BlockState {
        self.blocks[block.index()].state
    }

    /// Guards and pins that name a block.
    #[must_use]
    pub fn references(&self, block: BlockId) -> u32 {
        match self.state(block) {
            BlockState::Held(n) => n,
            _ => 0,
        }
    }

    /// Requests that may write a block.
    #[must_use]
    pub fn owners(&self, block: BlockId) -> u32 {
        self.blocks[block.index()].owners
    }

    /// Blocks evicted so far.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Counts of one group.
    #[must_use]
    pub fn counts(&self, group: GroupId) -> GroupCounts {
        let pool = &self.groups[group.index()];
        GroupCounts {
            total: pool.total,
            free: pool.free,
            held: pool.held,
            cached: pool.cached,
            claimable: self.arena.unclaimed() * pool.slab_blocks as usize,
            block_pages: pool.pages,
        }
    }

    /// Takes blocks, all or nothing, as many of each group as `needs` says, evicting cached blocks
    /// where free ones do not suffice. Appends to `out` group by group.
    ///
    /// # Errors
    /// `PoolFull` with the needs and means of the group that runs out; nothing has changed then.
    pub fn allocate<E: Evict>(
        &mut self,
        needs: &[usize],
        index: &mut E,
        out: &mut Vec<BlockId>,
    ) -> Result<(), Error> {
        debug_assert_eq!(needs.len(), self.groups.len(), "a need of each group");
        if self.groups.iter().zip(needs).any(|(group, &need)| group.free < need) {
            self.make_room(needs, index)?;
        }
        for (group, &need) in (0..).map(GroupId).zip(needs) {
            self.take(group, need, out);
        }
        Ok(())
    }

    /// Pages of the blocks that `needs` names.
    #[must_use]
    pub fn pages_of(&self, needs: &[usize]) -> u64 {
        let pages = |(group, &need): (&Group, &usize)| need as u64 * u64::from(group.pages);
        self.groups.iter().zip(needs).map(pages).sum()
    }

    /// Evicts the cached block of a group that goes first, with everything the index forgets along
    /// with it. False if nothing is cached.
    pub(super) fn evict_next<E: Evict>(&mut self, group: GroupId, index: &mut E) -> bool {
        let next = self.order.next(group);
        if let Some(block) = next {
            self.evict(block, index);
        }
        next.is_some()
    }

    /// Evicts a cached block, with everything the index forgets along with it.
    pub(crate) fn evict<E: Evict>(&mut self, block: BlockId, index: &mut E) {
        let mut forgotten = std::mem::take(&mut self.forgotten);
        index.evicted(block, &mut forgotten);
        self.evictions += 1;
        self.order.give_up(self.group(block), block);
        self.unindex(block);
        for other in forgotten.drain(..).filter(|&other| other != block) {
            self.unindex(other);
        }
        self.forgotten = forgotten;
    }

    /// From now on notes the pages of blocks that are freed, for [`Self::take_freed`].
    ///
    /// # Errors
    /// `OutOfMemory` where they find no room.
    pub fn note_freed_pages(&mut self) -> Result<(), Error> {
        if self.freed.is_none() {
            self.freed = Some(FreedPages::none_of(self.arena.pages())?);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn note_freed(&mut self, block: BlockId) {
        if let Some(freed) = &mut self.freed {
            let pages = self.groups[self.blocks[block.index()].group.index()].pages;
            freed.note(self.pages[block.index()] as usize, pages as usize);
        }
    }

    /// Pages of blocks that were freed since the last call, also of those that have been given to
    /// somebody since: runs of a first page and a number of them, in order.
    pub fn take_freed(&mut self) -> Vec<[i32; 2]> {
        self.freed.as_mut().map_or_else(Vec::new, FreedPages::take)
    }

    /// Takes note of what is known of blocks, for the order in which they are given up.
    pub fn advise(&mut self, blocks: &[BlockId], advice: Advice) {
        for &block in blocks {
            self.order.advise(self.group(block), block, advice);
        }
    }

    /// Says of blocks that they hold again what others held before and had to give up.
    pub fn recall(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().filter(|block| block.is_some()) {
            self.order.recall(block);
        }
    }

    /// Says what time it is, in the unit of [`Advice::until`]; it never goes back.
    pub fn set_time(&mut self, now: u64) {
        self.order.set_time(now);
    }

    /// Opens an account, of which at most `allowed` blocks of each group are cached where room is
    /// wanted: what is beyond that goes before blocks of others.
    ///
    /// # Errors
    /// `OutOfMemory` where the books of the first account find no room.
    pub fn open_account(&mut self, account: AccountId, allowed: usize) -> Result<(), Error> {
        self.order.open(account, allowed)
    }

    /// Closes an account; its blocks are nobody's.
    pub fn close_account(&mut self, account: AccountId) {
        if let Some(quotas) = self.order.quotas_mut() {
            quotas.close(account);
        }
    }

    /// Says how many blocks of each group an account may have cached.
    pub fn set_allowed(&mut self, account: AccountId, allowed: usize) {
        if let Some(quotas) = self.order.quotas_mut() {
            quotas.set_allowed(account, allowed);
        }
    }

    /// How many blocks of a group an account may have cached, and how many are.
    #[must_use]
    pub fn allowance(&self, account: AccountId, group: GroupId) -> (usize, usize) {
        self.order.quotas().map_or((0, 0), |quotas| quotas.allowance(account, group))
    }

    /// Says whose an indexed block is, until its content is forgotten.
    pub fn assign(&mut self, block: BlockId, account: Option<AccountId>) {
        let group = self.group(block);
        if let Some(quotas) = self.order.quotas_mut() {
            quotas.assign(group, block, account);
        }
    }

    /// Whether a block is findable by its content.
    #[must_use]
    pub fn is_indexed(&self, block: BlockId) -> bool {
        self.blocks[block.index()].indexed
    }

    /// Notes that the index names these blocks.
    pub fn mark_indexed(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.blocks[block.index()].indexed = true;
        }
    }

    /// Notes that the index no longer names a block; a cached one becomes free.
    pub fn unindex(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.index()];
        entry.indexed = false;
        if entry.state != BlockState::Cached {
            self.order.forget(block);
            return;
        }
        let pool = &mut self.groups[entry.group.index()];
        let slab = &mut self.slabs[usize::from(entry.slab)];
        self.order.leave_and_forget(entry.group, block);
        pool.cached -= 1;
        slab.cached -= 1;
        entry.state = BlockState::Free;
        slab.free.push(block);
        pool.free += 1;
        self.note_freed(block);
    }

    /// Adds a pin, which is a holder of every block of a row, and a count of its first block. That
    /// has had `hits`; `since` says in what order blocks were pinned.
    pub fn pin(&mut self, row: &[BlockId], hits: u32, since: (u64, u32)) {
        self.hold(row);
        let block = row[0];
        self.blocks[block.index()].pinned = true;
        self.pins.add(block, hits, since, self.references(block));
    }

    /// Removes a pin from a row of blocks.
    pub fn unpin(&mut self, row: &[BlockId]) {
        let block = row[0];
        if self.pins.remove(block) {
            self.blocks[block.index()].pinned = false;
        }
        self.release(row);
    }

    /// Notes how often a block has been hit, if it is pinned.
    pub fn note_hits(&mut self, block: BlockId, hits: u32) {
        if self.blocks[block.index()].pinned {
            self.pins.note_hits(block, hits, self.references(block));
        }
    }

    /// Pinned blocks that nobody reads, the first to be given up first.
    pub fn idle_pins(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.pins.idle()
    }

    /// How many pinned blocks nobody reads.
    #[must_use]
    pub fn idle_count(&self) -> usize {
        self.pins.idle().len()
    }
}
