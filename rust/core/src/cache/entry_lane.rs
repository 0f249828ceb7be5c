//! The entries of one table of one request as it decodes, in a segment of an array that they share
//! with those of other requests.
//!
//! A new token lengthens the last entry or begins one behind it, and what a window leaves goes at
//! the front. So a lane that is loaded once is kept up by an entry or two a step.

use std::collections::VecDeque;
use std::ops::Range;

use crate::ids::GroupId;

use super::entry_room::{EntryRoom, Segment};
use super::holding::Holding;
use super::request::Request;

/// What a lane lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A table of the request, as it is: `shift` is taken from each block number.
    Table { table: usize, shift: i32 },
    /// Of a window group's table what a head sees, slot by slot: the latest `window` tokens and the
    /// first `sink`.
    Seen { group: GroupId, window: usize, sink: usize },
}

/// Entries that are to be written into the array: where, and what. No place comes twice.
#[derive(Debug, Default)]
pub struct EntryMoves {
    /// [M] places in the array.
    pub places: Vec<i64>,
    /// [M] rows `[block, begin, end, position, delta]`.
    pub entries: Vec<[i32; 5]>,
}

impl EntryMoves {
    fn put(&mut self, place: usize, entry: [i32; 5]) {
        self.places.push(place as i64);
        self.entries.push(entry);
    }
}

pub(super) struct Lane {
    pub(super) source: Source,
    segment: Option<Segment>,
    /// Where its first entry lies, and how many there are.
    first: usize,
    count: usize,
    last: [i32; 5],
    /// All of them, where some leave at the front; those of the sink stay.
    listed: VecDeque<[i32; 5]>,
    sinks: usize,
}

impl Lane {
    pub(super) fn new(source: Source) -> Lane {
        let (segment, first, count) = (None, 0, 0);
        let (last, listed, sinks) = ([0; 5], VecDeque::new(), 0);
        Lane { source, segment, first, count, last, listed, sinks }
    }

    /// Where its entries lie in the array: from, to.
    pub(super) fn span(&self) -> [i32; 2] {
        [self.first, self.first + self.count].map(|place| place as i32)
    }

    /// The request's table that it is made from.
    fn held<'a>(&self, request: &'a Request) -> &'a Holding {
        match self.source {
            Source::Table { table, .. } => &request.holdings[table],
            Source::Seen { group, .. } => &request.holdings[group.index()],
        }
    }

    /// Where the last of `len` tokens goes: `[block, slot]`, `[-1, -1]` where it is not kept.
    pub(super) fn slot(&self, request: &Request, len: usize) -> [i32; 2] {
        let newest = self.held(request).table.newest(len);
        newest.map_or([-1, -1], |[block, _, end, ..]| [block - self.shift(), end - 1])
    }

    fn shift(&self) -> i32 {
        match self.source {
            Source::Table { shift, .. } => shift,
            Source::Seen { .. } => 0,
        }
    }

    /// Gives its segment back.
    pub(super) fn leave(&mut self, room: &mut EntryRoom) {
        if let Some(segment) = self.segment.take() {
            room.give_back(segment);
        }
    }

    /// Takes in what the request's tokens from `first` on have changed, and that of those before it
    /// listed only `kept`, where that is said.
    pub(super) fn follow(
        &mut self,
        request: &Request,
        (kept, first): (Option<usize>, usize),
        room: &mut EntryRoom,
        moves: &mut EntryMoves,
    ) {
        let held = self.held(request);
        let newest = held.table.newest(request.len());
        let followed = match (self.segment, newest) {
            (Some(segment), Some(newest)) if self.moves_on(held) => {
                // Where donors lie in a window, what goes at its front need not be whole entries. A
                // window has few entries: what is more than the newest token is listed anew.
                let plain = held.table.donors().is_empty();
                let next = kept.is_none() && first + 1 == request.len();
                plain && next && self.slide(held, newest, segment, moves)
            }
            (Some(segment), Some(_)) => {
                self.cut_to(held, kept.unwrap_or(first));
                self.grow_from(held, first..request.len(), segment, moves)
            }
            _ => false,
        };
        if !followed {
            self.load(request, room, moves);
        }
    }

    /// Lists no more than `len` tokens, of which the last block is listed again with the next.
    fn cut_to(&mut self, held: &Holding, len: usize) {
        let page = held.table.span(0).len();
        let behind = (self.last[3] as usize / page).saturating_sub(len / page);
        if behind > 0 && self.count > behind {
            self.count -= behind;
            // What is listed of a block begins at the same position, however much of it there is.
            self.last = held.table.newest(len + 1).unwrap_or_default();
        }
    }

    /// The entries of new tokens at the end; false where there is no room for them.
    fn grow_from(
        &mut self,
        held: &Holding,
        tokens: Range<usize>,
        segment: Segment,
        moves: &mut EntryMoves,
    ) -> bool {
        let page = held.table.span(0).len();
        let told = moves.places.len();
        for b in tokens.start / page..tokens.end.div_ceil(page) {
            let newest = held.table.newest(tokens.end.min((b + 1) * page));
            if !newest.is_some_and(|newest| self.grow(newest, segment, moves)) {
                // What was said of some of them is said again with all.
                moves.places.truncate(told);
                moves.entries.truncate(told);
                return false;
            }
        }
        true
    }

    /// Whether entries leave at the front.
    fn moves_on(&self, held: &Holding) -> bool {
        held.window.is_some()
    }

    /// The newest entry at the end; false where there is no room for it.
    fn grow(&mut self, newest: [i32; 5], segment: Segment, moves: &mut EntryMoves) -> bool {
        let newest = shifted(newest, self.shift());
        if self.count == 0 || self.last[3] != newest[3] {
            if self.first + self.count == segment.end() {
                return false;
            }
            self.count += 1;
        }
        self.last = newest;
        moves.put(self.first + self.count - 1, newest);
        true
    }

    /// The newest entry at the end, and at the front what is no longer listed; false where there is
    /// no room.
    fn slide(
        &mut self,
        held: &Holding,
        newest: [i32; 5],
        segment: Segment,
        moves: &mut EntryMoves,
    ) -> bool {
        let moved = self.append(held, newest);
        let (gone, cut) = self.leave_behind(held, newest[3] + newest[2] - newest[1]);
        let (first, count) = (self.first + gone, self.listed.len());
        if first + count > segment.end() {
            return false;
        }
        (self.first, self.count) = (first, count);
        let kept = if gone > 0 { 0 } else { self.sinks - usize::from(moved) };
        for (place, &entry) in (first..).zip(&self.listed).take(self.sinks).skip(kept) {
            moves.put(place, entry);
        }
        if cut && self.sinks + 1 < count {
            moves.put(first + self.sinks, self.listed[self.sinks]);
        }
        moves.put(first + count - 1, self.listed[count - 1]);
        true
    }

    /// Lists the newest token. Returns whether the sink ends in its block and that block is
    /// another now: the one before was shared with a fork.
    fn append(&mut self, held: &Holding, newest: [i32; 5]) -> bool {
        let [block, begin, end, position, delta] = newest;
        let page = held.table.span(0).len() as i32;
        let at = position + end - begin - 1;
        let sink = self.sink(held);
        let split = matches!(self.source, Source::Seen { .. }) && at == sink;
        match self.listed.back_mut() {
            Some(last) if last[3] / page == at / page && !split => {
                (last[0], last[2]) = (block, end);
            }
            _ => {
                self.listed.push_back([block, end - 1, end, at, delta]);
                self.sinks += usize::from(at < sink);
            }
        }
        // Where the sink ends within a block, two entries list that block.
        let behind_sink = self.sinks > 0 && self.sinks < self.listed.len();
        let Some(last) = self.listed.get_mut(self.sinks.wrapping_sub(1)) else { return false };
        let moved = behind_sink && last[3] / page == at / page && last[0] != block;
        if moved {
            last[0] = block;
        }
        moved
    }

    fn sink(&self, held: &Holding) -> i32 {
        let sink = match self.source {
            Source::Table { .. } => held.window.map_or(0, |window| window.sink),
            Source::Seen { sink, .. } => sink,
        };
        i32::try_from(sink).unwrap_or(i32::MAX)
    }

    /// Drops the entries behind the sink that a request of `len` tokens no longer lists. Returns
    /// how many, and whether the first of those that are left was cut.
    fn leave_behind(&mut self, held: &Holding, len: i32) -> (usize, bool) {
        let page = held.table.span(0).len();
        let (mut gone, mut cut) = (0, false);
        while self.sinks + 1 < self.listed.len() {
            let [_, begin, end, position, _] = self.listed[self.sinks];
            let is_gone = match self.source {
                Source::Table { .. } => held.table.block(position as usize / page).is_none(),
                Source::Seen { window, .. } => position + end - begin <= oldest(len, window),
            };
            if !is_gone {
                break;
            }
            self.listed.remove(self.sinks);
            gone += 1;
        }
        if let (Source::Seen { window, .. }, Some(front)) =
            (self.source, self.listed.get_mut(self.sinks))
        {
            let ahead = oldest(len, window) - front[3];
            if ahead > 0 {
                (front[1], front[3]) = (front[1] + ahead, front[3] + ahead);
                cut = true;
            }
        }
        (gone, cut)
    }

    /// Lists everything anew, in a segment with room for more.
    fn load(&mut self, request: &Request, room: &mut EntryRoom, moves: &mut EntryMoves) {
        let held = self.held(request);
        let (moving, sink) = (self.moves_on(held), self.sink(held));
        let entries = held.table.entries(request.len());
        let entries: Vec<[i32; 5]> = match self.source {
            Source::Table { shift, .. } => {
                entries.into_iter().map(|entry| shifted(entry, shift)).collect()
            }
            Source::Seen { window, .. } => seen(&entries, request.len() as i32, (window, sink)),
        };
        // A window's entries move towards the end of the segment before they are loaded anew.
        let wanted = if moving { 2 * entries.len() } else { entries.len() + 1 };
        if self.segment.is_none_or(|segment| segment.len() < wanted) {
            self.leave(room);
            self.segment = Some(room.take(wanted));
        }
        self.first = self.segment.map_or(0, |segment| segment.start);
        self.count = entries.len();
        self.last = entries.last().copied().unwrap_or_default();
        for (place, &entry) in (self.first..).zip(&entries) {
            moves.put(place, entry);
        }
        if moving {
            self.sinks = entries.iter().take_while(|entry| entry[3] < sink).count();
            self.listed = entries.into();
        }
    }
}

/// The first position that the newest row of `len` tokens sees, those of the sink aside.
fn oldest(len: i32, window: usize) -> i32 {
    len.saturating_sub(i32::try_from(window).unwrap_or(i32::MAX))
}

fn shifted([block, begin, end, position, delta]: [i32; 5], shift: i32) -> [i32; 5] {
    [block - shift, begin, end, position, delta]
}

/// The parts of entries that the newest row of `len` tokens sees; none lies on both sides of the
/// sink's end.
fn seen(entries: &[[i32; 5]], len: i32, (window, sink): (usize, i32)) -> Vec<[i32; 5]> {
    let mut parts = Vec::with_capacity(entries.len() + 1);
    for &[block, begin, end, position, delta] in entries {
        let after = position + end - begin;
        let late = position.max(sink).max(oldest(len, window));
        for (from, to) in [(position, after.min(sink)), (late, after)] {
            if from < to {
                let slots = [begin + from - position, begin + to - position];
                parts.push([block, slots[0], slots[1], from, delta]);
            }
        }
    }
    parts
}
