//! KV that lies in the host's memory while a request decodes (FlexiCache, §3.3).
//!
//! A head group whose rows choose what they read needs few of its blocks on the device. The others
//! lie at home, in memory that is booked elsewhere, and the request holds blocks of the pool as
//! slots, into which its rows bring what they have chosen. Who moves bytes says so here, before
//! anybody may write where they lay.

use std::ops::Range;

use hashbrown::HashSet;

use crate::error::Error;
use crate::ids::{BlockId, GroupId};

use super::books::{Common, State};
use super::freeze;
use super::request::Request;

/// The blocks of some tokens that the device no longer has to hold for a request.
#[derive(Default)]
struct Leaving {
    /// Those that this request can write again at once, other private ones, those of the prefix.
    again: Vec<BlockId>,
    private: Vec<BlockId>,
    prefix: Vec<BlockId>,
}

impl Request {
    /// Says that the whole blocks of a head group behind those that were spilled before have their
    /// KV in the host's memory from now on, in blocks of these numbers there, at least 0. Their own
    /// go back to the pool, cached where they are committed. The request holds at least `slots`
    /// blocks of the pool in place of all that it spilled: returns the pages of these, which hold
    /// anything.
    ///
    /// Entries list such a block as −1 − its number at home. Tokens may be appended as ever. What
    /// reads or writes all KV is refused until [`Self::bring_back`]. [`DecodeRows`] that have
    /// listed the request go on with their entries: who reads them knows what was spilled.
    ///
    /// # Errors
    /// `OutOfRange` for a group that the model has not, or more blocks than are full before the
    /// newest token's; `InvalidArgument` for a window group, a negative number, donors that are
    /// read in place, copies that were not taken, or a prompt in chunks; `PoolFull` without room
    /// for the slots. Nothing has changed then.
    ///
    /// [`DecodeRows`]: super::DecodeRows
    pub fn spill(&mut self, group: GroupId, home: &[i32], slots: usize) -> Result<Vec<i32>, Error> {
        self.check_spill(group, home)?;
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let first = self.holdings[group.index()].spilled;
        let leaving = self.leaving(state, group, first..first + home.len());
        let held = &self.holdings[group.index()];
        let wanted = slots.saturating_sub(held.slots.blocks().len());
        let need = wanted.saturating_sub(leaving.again.len());
        let mut supply = self.exchange_for_slots(&common, state, group, (&leaving, need))?;
        let held = &mut self.holdings[group.index()];
        held.private.part_with(&leaving.private);
        held.private.part_with(&leaving.again);
        held.prefix.part_with(&leaving.prefix);
        supply.extend(leaving.again);
        let excess = supply.split_off(wanted.min(supply.len()));
        held.slots.extend(&supply);
        state.pool.disown(&excess);
        state.pool.release(&excess);
        for (b, &number) in (first..).zip(home) {
            held.table.set(b, BlockId::NONE, -1 - number);
        }
        held.spilled = first + home.len();
        Ok(held.slots.blocks().iter().map(|&block| state.pool.page(block)).collect())
    }

    /// Gives all that was spilled of a head group blocks of the pool again, into which its KV is to
    /// be brought before anything is read; the slots go. Tables are listed anew.
    ///
    /// # Errors
    /// `OutOfRange` for a group that the model has not, `PoolFull`. Nothing has changed then.
    pub fn bring_back(&mut self, group: GroupId) -> Result<(), Error> {
        self.check_group(group)?;
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let held = &self.holdings[group.index()];
        let count = held.spilled;
        if count == 0 {
            return Ok(());
        }
        let mut needs = vec![0; state.pool.group_count()];
        needs[group.index()] = count.saturating_sub(held.slots.blocks().len());
        let mut fresh = Vec::with_capacity(needs[group.index()]);
        freeze::allocate(&common, state, &needs, &mut fresh)?;
        let held = &mut self.holdings[group.index()];
        fresh.extend(held.slots.take_last(usize::MAX));
        let excess = fresh.split_off(count);
        state.pool.disown(&excess);
        state.pool.release(&excess);
        for (b, &block) in fresh.iter().enumerate() {
            held.table.set(b, block, state.pool.page(block));
        }
        held.private.extend(&fresh);
        held.spilled = 0;
        self.revision += 1;
        Ok(())
    }

    /// Blocks of a head group that lie in the host's memory: its first ones.
    ///
    /// # Errors
    /// `OutOfRange` for a group that the model has not.
    pub fn spilled(&self, group: GroupId) -> Result<usize, Error> {
        self.check_group(group)?;
        Ok(self.holdings[group.index()].spilled)
    }

    /// Refuses what needs all KV in blocks of the pool.
    pub(super) fn resident(&self, what: &str) -> Result<(), Error> {
        let spilled: usize = self.holdings.iter().map(|held| held.spilled).sum();
        if spilled > 0 {
            let got = format!("{spilled} blocks of it in the host's memory");
            return Err(Error::invalid(what, "a request whose KV was brought back", got));
        }
        Ok(())
    }

    fn check_spill(&self, group: GroupId, home: &[i32]) -> Result<(), Error> {
        self.check_group(group)?;
        self.copies_taken("spill")?;
        self.chunks_done("spill")?;
        let held = &self.holdings[group.index()];
        if held.window.is_some() {
            let expected = "a head group that keeps every token";
            return Err(Error::invalid("spill", expected, "a window group"));
        }
        if !held.table.donors().is_empty() || !held.pieces.is_empty() {
            let expected = "a request whose tokens lie in blocks of its own grid";
            return Err(Error::invalid("spill", expected, "donors that are read in place"));
        }
        let most = self.len().saturating_sub(1) / self.common.page_tokens() - held.spilled;
        if home.len() > most {
            let expected = format!("up to {most} blocks before the newest token's");
            return Err(Error::out_of_range("spill", expected, home.len()));
        }
        match home.iter().find(|&&number| number < 0) {
            Some(&number) => Err(Error::invalid("home", "numbers from 0 on", number)),
            None => Ok(()),
        }
    }

    /// The blocks of grid blocks that are to be spilled, by what becomes of them.
    fn leaving(&self, state: &State, group: GroupId, grid: Range<usize>) -> Leaving {
        let held = &self.holdings[group.index()];
        let prefix: HashSet<BlockId> = held.prefix.blocks().iter().copied().collect();
        let mut leaving = Leaving::default();
        for block in grid.filter_map(|b| held.table.block(b)) {
            let alone = state.pool.references(block) == 1 && !state.pool.is_indexed(block);
            let part = match (prefix.contains(&block), alone) {
                (true, _) => &mut leaving.prefix,
                (false, true) => &mut leaving.again,
                (false, false) => &mut leaving.private,
            };
            part.push(block);
        }
        leaving
    }

    /// Gives back what others hold or may find, and takes `need` blocks: both or neither.
    fn exchange_for_slots(
        &self,
        common: &Common,
        state: &mut State,
        group: GroupId,
        (leaving, need): (&Leaving, usize),
    ) -> Result<Vec<BlockId>, Error> {
        state.pool.disown(&leaving.private);
        state.pool.release(&leaving.private);
        state.pool.release(&leaving.prefix);
        let mut needs = vec![0; state.pool.group_count()];
        needs[group.index()] = need;
        let mut fresh = Vec::with_capacity(need);
        let taken = freeze::allocate(common, state, &needs, &mut fresh);
        if let Err(error) = taken {
            state.pool.hold_as_owner(&leaving.private);
            state.pool.hold(&leaving.prefix);
            return Err(error);
        }
        Ok(fresh)
    }
}
