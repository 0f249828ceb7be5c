//! Admission: look up, plan, hold, allocate; all or nothing.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::ids::BlockId;
use crate::plan::{BlockTable, Window};
use crate::pool::{SharedBlocks, Stored, WritableBlocks};
use crate::segment::{Index, Piece};

use super::found::{Found, find};
use super::request::{Chain, Request};
use super::{Shared, freeze};

/// What an admission may reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// Nothing.
    None,
    /// The exact prefix.
    Prefix,
    /// The exact prefix, then segments.
    #[default]
    Segments,
}

/// How reused segments are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Copied into private blocks, K rotated to the new position.
    #[default]
    Materialise,
    /// Where they are, with the query rotated back.
    Share,
}

/// A token range that may be reused from a namespace wherever it stands.
#[derive(Clone, Copy, Debug)]
pub struct MarkedSegment<'a> {
    /// First position.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// The namespace it may come from.
    pub namespace: &'a str,
}

/// A prompt and what may be done with it.
#[derive(Clone, Copy, Debug)]
pub struct Admission<'a> {
    /// Token ids, at least one.
    pub tokens: &'a [u32],
    /// The namespace of the prompt itself: its prefix, discovery, and what it leaves behind.
    pub namespace: &'a str,
    /// Reusable ranges, in any order, not overlapping.
    pub marked: &'a [MarkedSegment<'a>],
    /// Whether unmarked text is searched for cached content too.
    pub discover: bool,
    /// What may be reused.
    pub reuse: Reuse,
    /// How segments are read.
    pub mode: Mode,
    /// Room for this many tokens after the prompt.
    pub reserve_tokens: usize,
    /// Fingerprint of the RoPE parameters: part of every key.
    pub regime: u64,
}

impl<'a> Admission<'a> {
    /// A prompt in the empty namespace with no marks, no discovery, copies and no reserve.
    #[must_use]
    pub fn new(tokens: &'a [u32]) -> Admission<'a> {
        Admission {
            tokens,
            namespace: "",
            marked: &[],
            discover: false,
            reuse: Reuse::default(),
            mode: Mode::default(),
            reserve_tokens: 0,
            regime: 0,
        }
    }

    /// The marks in order of position.
    fn sorted_marks(&self) -> Result<Vec<MarkedSegment<'a>>, Error> {
        let total = self.tokens.len();
        if total == 0 {
            return Err(Error::invalid("prompt", "at least one token", 0));
        }
        let room = total.checked_add(self.reserve_tokens).and_then(|n| i32::try_from(n).ok());
        if room.is_none() {
            let got = format!("{total} + {} reserved", self.reserve_tokens);
            return Err(Error::invalid("prompt", "at most 2147483647 positions", got));
        }
        let mut marks = self.marked.to_vec();
        for mark in &marks {
            if mark.start >= mark.end || mark.end > total {
                let expected = format!("a non-empty range inside [0, {total})");
                let got = format!("[{}, {})", mark.start, mark.end);
                return Err(Error::out_of_range("marked segment", expected, got));
            }
        }
        marks.sort_unstable_by_key(|mark| (mark.start, mark.end));
        let overlap = marks.windows(2).find(|pair| pair[1].start < pair[0].end);
        match overlap {
            Some(pair) => Err(overlapping(&pair[0], &pair[1])),
            None => Ok(marks),
        }
    }
}

fn overlapping(first: &MarkedSegment<'_>, second: &MarkedSegment<'_>) -> Error {
    let named = |mark: &MarkedSegment<'_>| {
        format!("[{}, {}) of {:?}", mark.start, mark.end, mark.namespace)
    };
    let got = format!("{} and {}", named(first), named(second));
    let same = first.namespace == second.namespace;
    let kind = if same { ErrorKind::InvalidArgument } else { ErrorKind::NamespaceConflict };
    Error::new(kind, "marked segments", "segments that do not overlap", got)
}

fn rows_of(index: &Index, anchors: impl Iterator<Item = BlockId>) -> Vec<BlockId> {
    anchors.flat_map(|anchor| index.row(anchor).iter().copied()).collect()
}

pub(super) fn admit(shared: &Arc<Shared>, request: &Admission<'_>) -> Result<Request, Error> {
    let marks = request.sorted_marks()?;
    let page = shared.page_tokens();
    let mut stored = shared.store.lock();
    let state = &mut *stored;
    freeze::regrow(shared, state);
    let found = find(&mut state.index, request, &marks, page);
    let plan = found.plan(&state.index, request.tokens.len());

    let prefix = rows_of(&state.index, found.prefix.iter().copied());
    let donors = rows_of(&state.index, found.donors());
    let grid = found.private_grid(request, page);
    let rows = grid.iter().filter(|needed| **needed).count();
    let mut private = Vec::with_capacity(rows * shared.groups.len());
    state.pool.hold(&prefix);
    state.pool.hold(&donors);
    freeze::relieve(shared, state, rows);
    if let Err(error) = state.pool.allocate(rows, &mut state.index, &mut private) {
        state.pool.release(&donors);
        state.pool.release(&prefix);
        return Err(error);
    }
    for anchor in found.prefix.iter().copied().chain(found.donors()) {
        state.index.count_use(anchor);
    }
    let table = build_table(shared, state, &found, &grid, &private, request.mode);
    let mut copies = vec![Vec::new(); shared.groups.len()];
    for piece in found.copied(request.mode) {
        let pages: Vec<i32> =
            state.index.row(piece.donor).iter().map(|&block| state.pool.page(block)).collect();
        copy_piece(&table, page, &piece, &pages, &mut copies);
    }
    let last = found.prefix.last().map(|&block| state.index.link(block));
    let chain = Chain::new(found.chain.parent, last, found.chain.digest, found.prefix.len());
    drop(stored);
    shared.counters.add(&plan);
    Ok(Request {
        shared: Arc::clone(shared),
        namespace: request.namespace.to_owned(),
        key: found.key,
        marks: found.marks,
        tokens: request.tokens.to_vec(),
        share: request.mode == Mode::Share,
        plan,
        table,
        read_only: found.prefix.len(),
        committed: found.prefix.len() * page,
        exact: found.prefix.len() * page,
        chain,
        before: last,
        copies,
        prefix: SharedBlocks::adopt(&shared.store, prefix),
        donors: Some(SharedBlocks::adopt(&shared.store, donors)),
        replaced: Vec::new(),
        private: WritableBlocks::adopt(&shared.store, private),
    })
}

fn build_table(
    shared: &Shared,
    state: &Stored<Index>,
    found: &Found,
    grid: &[bool],
    private: &[BlockId],
    mode: Mode,
) -> BlockTable {
    let groups = shared.groups.len();
    let page_of = |block: BlockId| state.pool.page(block);
    let mut table = BlockTable::new(shared.page_tokens(), groups);
    for &anchor in &found.prefix {
        table.push(Some(state.index.row(anchor)), page_of);
    }
    let mut rows = private.chunks_exact(groups);
    for &needed in grid {
        table.push(if needed { rows.next() } else { None }, page_of);
    }
    if mode == Mode::Share {
        for piece in &found.matches.pieces {
            let pages: Vec<i32> =
                state.index.row(piece.donor).iter().map(|&block| page_of(block)).collect();
            let Piece { start, end, begin, delta, .. } = *piece;
            table.push_window(Window { start, end, begin, delta, donor: 0 }, &pages);
        }
    }
    table
}

/// Appends the copies of a piece into the request's grid, one a destination block and group.
fn copy_piece(
    table: &BlockTable,
    page: usize,
    piece: &Piece,
    donor_pages: &[i32],
    copies: &mut [Vec<[i32; 6]>],
) {
    let mut at = piece.start;
    while at < piece.end {
        let b = at / page;
        let end = piece.end.min((b + 1) * page);
        let source = piece.begin as usize + at - piece.start;
        for (group, copies) in copies.iter_mut().enumerate() {
            copies.push([
                donor_pages[group],
                source as i32,
                table.page(b, group),
                (at - b * page) as i32,
                (end - at) as i32,
                piece.delta,
            ]);
        }
        at = end;
    }
}
