//! KV that lies in the host's memory while a request decodes (FlexiCache, §3.3).
//!
//! A head group whose rows choose what they read needs few of its blocks on the device. The others
//! lie at home, in memory that is booked elsewhere, and the request holds blocks of the pool as
//! slots, into which its rows bring what they have chosen. Who moves bytes says so here, before
//! anybody may write where they lay.

use std::ops::Range;

use hashbrown::{HashMap, HashSet};

use crate::error::Error;
use crate::ids::{BlockId, GroupId};
use crate::plan::Listed;

use super::books::{Common, State};
use super::freeze;
use super::holding::Holding;
use super::request::Request;

/// The blocks of some entries that the device no longer has to hold for a request.
#[derive(Default)]
struct Leaving {
    /// Those that this request can write again at once, other private ones, those of the prefix.
    again: Vec<BlockId>,
    private: Vec<BlockId>,
    prefix: Vec<BlockId>,
    /// Donors, as often as they are held.
    donors: Vec<BlockId>,
}

impl Request {
    /// Says that the entries of a head group's table behind those that were spilled before have
    /// their KV in the host's memory from now on: each slot by slot as in its block, in a block of
    /// the number `home` [N] there, at least 0. The blocks themselves go back to the pool, cached
    /// where they are committed, and donors that nothing else is read from are let go of. The
    /// request holds at least `slots` blocks of the pool in place of all that it spilled: returns
    /// the pages of these, which hold anything.
    ///
    /// Entries list such a block as −1 − its number at home. Tokens may be appended as ever. What
    /// reads or writes all KV is refused until [`Self::bring_back`]. [`DecodeRows`] that have
    /// listed the request go on with their entries: who reads them knows what was spilled.
    ///
    /// # Errors
    /// `OutOfRange` for a group that the model has not, or more entries than end before the newest
    /// token's block; `InvalidArgument` for a window group, a negative number, entries of one block
    /// of the request's own that have several numbers or of which some stay, copies that were not
    /// taken, or a prompt in chunks; `PoolFull` without room for the slots. Nothing has changed
    /// then.
    ///
    /// [`DecodeRows`]: super::DecodeRows
    pub fn spill(&mut self, group: GroupId, home: &[i32], slots: usize) -> Result<Vec<i32>, Error> {
        let going = self.check_spill(group, home)?;
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let held = &self.holdings[group.index()];
        let leaving = held.leaving(state, &going);
        let wanted = slots.saturating_sub(held.slots.blocks().len());
        let need = wanted.saturating_sub(leaving.again.len());
        let mut supply = exchange_for_slots(&common, state, group, (&leaving, need))?;
        let held = &mut self.holdings[group.index()];
        held.private.part_with(&leaving.private);
        held.private.part_with(&leaving.again);
        held.prefix.part_with(&leaving.prefix);
        held.donors.part_with(&leaving.donors);
        supply.extend(leaving.again);
        let excess = supply.split_off(wanted.min(supply.len()));
        held.slots.extend(&supply);
        state.pool.disown(&excess);
        state.pool.release(&excess);
        for ((listed, positions), &number) in going.into_iter().zip(home) {
            held.put(listed, BlockId::NONE, -1 - number);
            held.away = positions.end;
        }
        held.spilled += home.len();
        Ok(held.slots.blocks().iter().map(|&block| state.pool.page(block)).collect())
    }

    /// Gives all that was spilled of a head group blocks of the pool again, into which its KV is to
    /// be brought before anything is read; the slots go. Tables are listed anew, with the same
    /// entries in other blocks: what was read from donors is so again, each of which is this
    /// request's alone.
    ///
    /// # Errors
    /// `OutOfRange` for a group that the model has not, `PoolFull`. Nothing has changed then.
    pub fn bring_back(&mut self, group: GroupId) -> Result<(), Error> {
        self.check_group(group)?;
        let common = self.common.clone();
        let mut stored = common.store.lock();
        let state = &mut *stored;
        let len = self.len();
        let held = &self.holdings[group.index()];
        if held.spilled == 0 {
            return Ok(());
        }
        let homeless = held.homeless(len);
        let count = homeless.len();
        let mut needs = vec![0; state.pool.group_count()];
        needs[group.index()] = count.saturating_sub(held.slots.blocks().len());
        let mut fresh = Vec::with_capacity(needs[group.index()]);
        freeze::allocate(&common, state, &needs, &mut fresh)?;
        let held = &mut self.holdings[group.index()];
        fresh.extend(held.slots.take_last(usize::MAX));
        let excess = fresh.split_off(count);
        state.pool.disown(&excess);
        state.pool.release(&excess);
        for (entries, &block) in homeless.iter().zip(&fresh) {
            let page = state.pool.page(block);
            entries.iter().for_each(|&listed| held.put(listed, block, page));
            if matches!(entries[..], [Listed::Grid(_), ..]) {
                held.private.extend(&[block]);
            } else {
                state.pool.disown(&[block]);
                held.donors.extend(&[block]);
            }
        }
        (held.spilled, held.away) = (0, 0);
        self.revision += 1;
        Ok(())
    }

    /// Entries of a head group's table that lie in the host's memory: its first ones.
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

    /// Where the next entries lie that are to be spilled.
    fn check_spill(
        &self,
        group: GroupId,
        home: &[i32],
    ) -> Result<Vec<(Listed, Range<usize>)>, Error> {
        self.check_group(group)?;
        self.copies_taken("spill")?;
        self.chunks_done("spill")?;
        let held = &self.holdings[group.index()];
        if held.window.is_some() {
            let expected = "a head group that keeps every token";
            return Err(Error::invalid("spill", expected, "a window group"));
        }
        let page = self.common.page_tokens();
        let before = self.len().saturating_sub(1) / page * page;
        let listed = held.table.listed(self.len());
        let left = &listed[held.spilled..];
        let most = left.partition_point(|(_, positions)| positions.end <= before);
        if home.len() > most {
            let expected = format!("up to {most} entries before the newest token's block");
            return Err(Error::out_of_range("spill", expected, home.len()));
        }
        if let Some(&number) = home.iter().find(|&&number| number < 0) {
            return Err(Error::invalid("home", "numbers from 0 on", number));
        }
        let (going, staying) = left.split_at(home.len());
        let mut of_grid = HashMap::new();
        for ((listed, _), &number) in going.iter().zip(home) {
            if let Listed::Grid(b) = listed
                && *of_grid.entry(*b).or_insert(number) != number
            {
                let got = format!("several for block {b}");
                return Err(Error::invalid("home", "one number for entries of one block", got));
            }
        }
        // Those of one block are not far from each other: its next one comes before another's.
        let next = staying.iter().find_map(|(listed, _)| match listed {
            Listed::Grid(b) => Some(*b),
            Listed::Donor(_) => None,
        });
        if let Some(b) = next.filter(|b| of_grid.contains_key(b)) {
            let got = format!("some of block {b}");
            return Err(Error::invalid("spill", "all entries of a block", got));
        }
        Ok(going.to_vec())
    }
}

impl Holding {
    /// Has an entry read another block.
    fn put(&mut self, listed: Listed, block: BlockId, page: i32) {
        match listed {
            Listed::Grid(b) => self.table.set(b, block, page),
            Listed::Donor(number) => self.table.set_donor(number, block, page),
        }
    }

    /// The blocks of entries that are to be spilled, by what becomes of them.
    fn leaving(&self, state: &State, going: &[(Listed, Range<usize>)]) -> Leaving {
        let prefix: HashSet<BlockId> = self.prefix.blocks().iter().copied().collect();
        let mut leaving = Leaving::default();
        let mut last = None;
        for (listed, _) in going {
            let &Listed::Grid(b) = listed else { continue };
            let Some(block) = self.table.block(b).filter(|_| last != Some(b)) else { continue };
            last = Some(b);
            let alone = state.pool.references(block) == 1 && !state.pool.is_indexed(block);
            let part = match (prefix.contains(&block), alone) {
                (true, _) => &mut leaving.prefix,
                (false, true) => &mut leaving.again,
                (false, false) => &mut leaving.private,
            };
            part.push(block);
        }
        let first = going.iter().rev().find_map(|(listed, _)| match listed {
            Listed::Donor(number) => Some(number + 1),
            Listed::Grid(_) => None,
        });
        if let Some(first) = first {
            let staying = self.table.donors()[first..].iter().chain(&self.pieces);
            let used: HashSet<BlockId> = staying.map(|range| range.donor).collect();
            let donors = self.donors.blocks().iter().copied();
            leaving.donors = donors.filter(|block| !used.contains(block)).collect();
        }
        leaving
    }

    /// Entries that were spilled, those that had one block at home together, in order.
    fn homeless(&self, len: usize) -> Vec<Vec<Listed>> {
        let mut all: Vec<Vec<Listed>> = Vec::with_capacity(self.spilled);
        let mut of_home = HashMap::new();
        for (listed, _) in self.table.listed(len).into_iter().take(self.spilled) {
            let (page, of_grid) = match listed {
                Listed::Grid(b) => (self.table.page(b), true),
                Listed::Donor(number) => (self.table.donors()[number].page, false),
            };
            let at = *of_home.entry((page, of_grid)).or_insert(all.len());
            if at == all.len() {
                all.push(Vec::new());
            }
            all[at].push(listed);
        }
        all
    }
}

/// Gives back what others hold or may find, and takes `need` blocks: both or neither.
fn exchange_for_slots(
    common: &Common,
    state: &mut State,
    group: GroupId,
    (leaving, need): (&Leaving, usize),
) -> Result<Vec<BlockId>, Error> {
    let Leaving { private, prefix, donors, .. } = leaving;
    state.pool.disown(private);
    [private, prefix, donors].into_iter().for_each(|blocks| state.pool.release(blocks));
    let mut needs = vec![0; state.pool.group_count()];
    needs[group.index()] = need;
    let mut fresh = Vec::with_capacity(need);
    let taken = freeze::allocate(common, state, &needs, &mut fresh);
    if let Err(error) = taken {
        state.pool.hold_as_owner(private);
        [prefix, donors].into_iter().for_each(|blocks| state.pool.hold(blocks));
        return Err(error);
    }
    Ok(fresh)
}
