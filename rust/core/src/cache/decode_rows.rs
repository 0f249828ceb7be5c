//! What decode steps must know of the requests that take part, kept up from step to step.
//!
//! A request joins with its tables and leaves them behind; nobody else's are touched. Requests
//! whose heads were promoted differently share a step: its tables are those of the groups and one
//! for each head that any of them has promoted. A request that has not promoted such a head lists
//! for it what the head sees, cut to the slot, so that one window, none, holds for all.

use std::sync::Arc;

use crate::error::Error;
use crate::ids::GroupId;

use super::append_step::{StepRefused, append_runs};
use super::books::Common;
use super::entry_lane::{EntryMoves, Lane, Source};
use super::entry_room::EntryRoom;
use super::request::Request;

/// A head that has a table of its own in a step, and what it sees in requests that have not
/// promoted it: the latest `window` tokens and the first `sink`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepHead {
    /// Its layer.
    pub layer: u32,
    /// Its number in the layer.
    pub head: u32,
    /// At least 1.
    pub window: usize,
    /// Tokens at the start.
    pub sink: usize,
}

/// What one step reads and writes, and what has changed since the one before, of B requests with R
/// new tokens and T = groups + heads tables.
#[derive(Debug, Default)]
pub struct StepRows {
    /// [R]: of the new tokens, one request behind the other.
    pub positions: Vec<i32>,
    /// [T, R]: where their K, V go, `[block, slot]`.
    pub slots: Vec<[i32; 2]>,
    /// [B, T]: from where to where a table's entries lie in the array.
    pub spans: Vec<[i32; 2]>,
    /// Entries to be written into the array before it is read.
    pub moves: EntryMoves,
    /// [C] copies `[request, group, src_block, src_slot, dst_block, dst_slot, count, delta]` to be
    /// executed before anything is written; then [`Request::finish_copies`].
    pub copies: Vec<[i32; 8]>,
}

struct Row {
    /// That of the request when the lanes were last kept up; none before the first step.
    revision: Option<u64>,
    /// Its tokens then.
    len: usize,
    lanes: Vec<Lane>,
    /// [T]: which of them.
    of_table: Vec<usize>,
}

/// The tables of requests that decode together, in one array of entries.
pub struct DecodeRows {
    common: Arc<Common>,
    heads: Vec<StepHead>,
    /// Group, rank of each.
    places: Vec<(usize, i32)>,
    rows: Vec<Option<Row>>,
    room: EntryRoom,
}

impl DecodeRows {
    /// No rows yet, of requests of one cache.
    pub(super) fn of(common: &Arc<Common>) -> DecodeRows {
        let (common, room) = (Arc::clone(common), EntryRoom::new());
        DecodeRows { common, heads: Vec::new(), places: Vec::new(), rows: Vec::new(), room }
    }

    /// Tables of a request in a step.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.common.groups.len() + self.heads.len()
    }

    /// Entries of the array. It doubles when a step needs more; what lies in it stays where it is.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.room.len()
    }

    /// The most tables of its own that a request has brought: what it moves in a step.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.rows.iter().flatten().map(|row| row.lanes.len()).max().unwrap_or(0)
    }

    /// Says which heads have tables of their own from the next step on: all that any request of the
    /// batch has promoted. Those that had one before stay first.
    ///
    /// # Errors
    /// `OutOfRange` for a head that the model has not; `InvalidArgument` for one that is full
    /// anyway, comes twice, sees nothing or sees more than its group keeps, or where one of those
    /// before is missing while there are rows. Nothing has changed then.
    pub fn set_heads(&mut self, heads: &[StepHead]) -> Result<(), Error> {
        let rows = self.rows.iter().any(Option::is_some);
        if rows && !heads.starts_with(&self.heads) {
            let expected = "those of the rows first";
            return Err(Error::invalid("heads of a step", expected, "others"));
        }
        let mut places = Vec::with_capacity(heads.len());
        for (number, step_head) in heads.iter().enumerate() {
            let StepHead { layer, head, window, sink } = *step_head;
            let (group, rank) = self.common.groups.rank(layer, head)?;
            let name = format!("head ({layer}, {head})");
            let Some(kept) = self.common.groups.window(group) else {
                return Err(Error::invalid(name, "a head of a window group", "a full one"));
            };
            if heads[..number].iter().any(|other| (other.layer, other.head) == (layer, head)) {
                return Err(Error::invalid(name, "each head once", "it twice"));
            }
            if window == 0 || window > kept.recent || sink > kept.sink {
                let expected = format!("1 <= window <= {} and sink <= {}", kept.recent, kept.sink);
                return Err(Error::invalid(name, expected, format!("{window} and {sink}")));
            }
            places.push((group.index(), rank as i32));
        }
        self.heads = heads.to_vec();
        self.places = places;
        Ok(())
    }

    /// A row for one more request.
    pub fn join(&mut self) -> usize {
        let row = Row::new();
        let free = self.rows.iter().position(Option::is_none).unwrap_or(self.rows.len());
        if free == self.rows.len() {
            self.rows.push(None);
        }
        self.rows[free] = Some(row);
        free
    }

    /// Gives a row up.
    ///
    /// # Errors
    /// `OutOfRange` if there is no such row.
    pub fn leave(&mut self, row: usize) -> Result<(), Error> {
        let Some(mut left) = self.rows.get_mut(row).and_then(Option::take) else {
            return Err(self.no_row(row));
        };
        left.lanes.iter_mut().for_each(|lane| lane.leave(&mut self.room));
        Ok(())
    }

    fn no_row(&self, row: usize) -> Error {
        let held = self.rows.iter().flatten().count();
        Error::out_of_range("row", format!("one of the {held} that were joined"), row)
    }

    /// Appends a token to each request, as [`super::KvCache::append_step`] does, and says what the
    /// step needs. `rows`: the row of each request, any order; a request that changed otherwise
    /// since its last step is looked at anew, but for tokens that [`Request::truncate`] took back.
    ///
    /// # Errors
    /// As [`super::KvCache::append_step`]; `OutOfRange` for a row that nobody has,
    /// `InvalidArgument` for one that comes twice and for a request with a promoted head that has
    /// no table. Nothing has changed then.
    pub fn step(
        &mut self,
        requests: &mut [&mut Request],
        rows: &[usize],
        tokens: &[u32],
    ) -> Result<StepRows, StepRefused> {
        self.steps(requests, rows, tokens, &vec![1; requests.len()])
    }

    /// The same of `counts` tokens for each request, at least one: `tokens` are those of all, one
    /// request behind the other. Tables are those behind the last of them, and a row reads of them
    /// what is at positions up to its own.
    ///
    /// # Errors
    /// As [`Self::step`]; `InvalidArgument` also for more than one token of a request while heads
    /// have tables of their own.
    pub fn steps(
        &mut self,
        requests: &mut [&mut Request],
        rows: &[usize],
        tokens: &[u32],
        counts: &[usize],
    ) -> Result<StepRows, StepRefused> {
        self.check_rows(requests, rows)?;
        if !self.heads.is_empty() && counts.iter().any(|&count| count > 1) {
            // What such a head sees was listed for the newest row alone.
            let got = format!("{} heads with tables of their own", self.heads.len());
            return Err(Error::invalid("counts", "one token a request", got).into());
        }
        let kept = |(request, &row): (&&mut Request, &usize)| {
            let row = self.rows[row].as_ref()?;
            request.unchanged_since(row.revision?, row.len)
        };
        let kept: Vec<Option<usize>> = requests.iter().zip(rows).map(kept).collect();
        append_runs(&self.common, requests, tokens, counts)?;
        let (tables, new) = (self.tables(), tokens.len());
        let mut step = StepRows {
            positions: Vec::with_capacity(new),
            slots: vec![[-1, -1]; tables * new],
            spans: Vec::with_capacity(requests.len() * tables),
            ..StepRows::default()
        };
        for (number, request) in requests.iter_mut().enumerate() {
            let Some(row) = &mut self.rows[rows[number]] else { continue };
            if kept[number].is_none() {
                row.lanes.iter_mut().for_each(|lane| lane.leave(&mut self.room));
                *row = Row::new();
            }
            row.fit(request, &self.heads, &self.places);
            let (first, end) = (request.len() - counts[number], request.len());
            let kept = kept[number].filter(|&kept| kept < row.len);
            for lane in &mut row.lanes {
                lane.follow(request, (kept, first), &mut self.room, &mut step.moves);
            }
            let at = step.positions.len();
            step.positions.extend((first..end).map(|position| position as i32));
            for (table, &lane) in row.of_table.iter().enumerate() {
                let lane = &row.lanes[lane];
                for (slot, len) in step.slots[table * new + at..].iter_mut().zip(first + 1..=end) {
                    *slot = lane.slot(request, len);
                }
                step.spans.push(lane.span());
            }
            (row.revision, row.len) = (Some(request.revision), end);
            take_copies(number, request, &mut step.copies);
        }
        Ok(step)
    }

    fn check_rows(&self, requests: &[&mut Request], rows: &[usize]) -> Result<(), StepRefused> {
        let batch = requests.len();
        if rows.len() != batch {
            return Err(Error::invalid("rows", format!("{batch} of them"), rows.len()).into());
        }
        let mut taken = vec![false; self.rows.len()];
        for (number, (request, &row)) in requests.iter().zip(rows).enumerate() {
            let refused = |error: Error| StepRefused::of(number, batch, &error);
            if self.rows.get(row).is_none_or(Option::is_none) {
                return Err(refused(self.no_row(row)));
            }
            if std::mem::replace(&mut taken[row], true) {
                return Err(refused(Error::invalid(
                    "row",
                    "each row once",
                    format!("{row} twice"),
                )));
            }
            let has = |at: &&(u32, u32)| self.heads.iter().any(|h| (h.layer, h.head) == **at);
            if let Some(at) = request.promoted().iter().find(|at| !has(at)) {
                let expected = "tables for all promoted heads";
                return Err(refused(Error::invalid("heads", expected, format!("none for {at:?}"))));
            }
        }
        Ok(())
    }
}

impl Row {
    fn new() -> Row {
        Row { revision: None, len: 0, lanes: Vec::new(), of_table: Vec::new() }
    }

    /// Sees to a lane for each table of the step.
    fn fit(&mut self, request: &Request, heads: &[StepHead], places: &[(usize, i32)]) {
        let groups = request.common.groups.len();
        for table in self.of_table.len()..groups + heads.len() {
            let source = match table.checked_sub(groups) {
                None => Source::Table { table, shift: 0 },
                Some(number) => {
                    let StepHead { layer, head, window, sink } = heads[number];
                    let (group, rank) = places[number];
                    let own = request.promoted.iter().position(|&at| at == (layer, head));
                    own.map_or(
                        Source::Seen { group: GroupId(group as u8), window, sink },
                        // Readers add the head's rank in its group, whoever has promoted it.
                        |own| Source::Table { table: groups + own, shift: rank },
                    )
                }
            };
            let found = self.lanes.iter().position(|lane| lane.source == source);
            if found.is_none() {
                self.lanes.push(Lane::new(source));
            }
            self.of_table.push(found.unwrap_or(self.lanes.len() - 1));
        }
    }
}

fn take_copies(number: usize, request: &mut Request, copies: &mut Vec<[i32; 8]>) {
    for held in request.holdings.iter_mut().filter(|held| !held.copies.is_empty()) {
        let group = i32::from(held.group.0);
        for [block, slot, to, at, count, delta] in held.copies.take_rows() {
            copies.push([number as i32, group, block, slot, to, at, count, delta]);
        }
    }
}
