//! A head of a window group becomes full for one request (RedKnot, §4.2: restored heads).

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::pool::WritableBlocks;
use crate::tier::{Transfer, TransferPlan};

use super::freeze;
use super::holding::Holding;
use super::request::Request;

impl Request {
    /// Gives a head of a window group a table of its own over [0, len) and what was reserved, on
    /// blocks of one page. It is full for this request from now on: see [`Self::head_rows`].
    ///
    /// Returns copies `[src_page, src_slot, dst_page, dst_slot, count, delta]` that bring in what
    /// is stored of the head now; they are to be executed before it is read or written. What its
    /// group stores from now on lacks this head, so nobody else ever finds it.
    ///
    /// # Errors
    /// `OutOfRange` if the model has no such head; `InvalidArgument` if it is full already, copies
    /// have not been taken, or some of what it needs is gone or comes with a later chunk;
    /// `PoolFull`. Nothing has changed then.
    pub fn promote(&mut self, layer: u32, head: u32) -> Result<Vec<[i32; 6]>, Error> {
        let common = self.common.clone();
        let (group, rank) = common.groups.rank(layer, head)?;
        let name = format!("head ({layer}, {head})");
        if common.groups.window(group).is_none() || self.promoted.contains(&(layer, head)) {
            return Err(Error::invalid(name, "a head of a window group", "one that is full"));
        }
        self.copies_taken("promote")?;
        let held = &self.holdings[group.index()];
        if held.lost || !held.pieces.is_empty() {
            let got = if held.lost { "a part let go of" } else { "reused parts to come" };
            return Err(Error::invalid(name, "a window group with all it had", got));
        }
        let stored = held.table.entries(self.len());
        let single_page = GroupId(common.groups.len() as u8);
        let page = common.page_tokens();
        let blocks = self.len().max(self.reserved).div_ceil(page);
        let fresh = self.single_pages(single_page, blocks)?;
        let mut held = Holding::new(&common.store, single_page, None, page);
        for &(block, number) in &fresh {
            held.table.push(block, number);
        }
        let own = fresh.into_iter().map(|(block, _)| block).collect();
        held.private = WritableBlocks::adopt(&common.store, own);
        let mut copies = copies_into(&held, &stored, rank as i32, page as i32);
        self.holdings[group.index()].promoted_from = true;
        self.holdings.push(held);
        self.promoted.push((layer, head));
        self.revision += 1;
        Ok(copies.take_rows())
    }

    fn single_pages(&self, group: GroupId, count: usize) -> Result<Vec<(BlockId, i32)>, Error> {
        let mut stored = self.common.store.lock();
        let state = &mut *stored;
        let mut needs = vec![0; state.pool.group_count()];
        needs[group.index()] = count;
        let mut fresh = Vec::with_capacity(count);
        freeze::allocate(&self.common, state, &needs, &mut fresh)?;
        Ok(fresh.into_iter().map(|block| (block, state.pool.page(block))).collect())
    }
}

/// The copies of one page of each entry's block to the table of `held`, cut at its grid.
fn copies_into(held: &Holding, entries: &[[i32; 5]], rank: i32, page: i32) -> TransferPlan {
    let mut copies = TransferPlan::with_capacity(entries.len());
    for &[block, begin, end, position, delta] in entries {
        let (mut slot, mut at) = (begin, position);
        while slot < end {
            let count = (end - slot).min(page - at % page);
            let to = held.table.page((at / page) as usize);
            let (from, into) = ((block + rank, slot as u32), (to, (at % page) as u32));
            copies.push(Transfer { from, to: into, tokens: count as u32, delta });
            (slot, at) = (slot + count, at + count);
        }
    }
    copies
}
