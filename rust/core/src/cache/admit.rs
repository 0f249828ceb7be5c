//! Admission: look up, plan, hold, allocate; all or nothing.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::ids::{BlockId, KeyId};
use crate::plan::{BlockTable, Outcome, PlanSpan, ReusePlan, SegmentSource, Window};
use crate::pool::{SharedBlocks, Stored, WritableBlocks};
use crate::segment::{Index, Matches, MissReason, Parent, Piece, PrefixMatch};

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
        for pair in marks.windows(2).filter(|pair| pair[1].start < pair[0].end) {
            let expected = "segments that do not overlap";
            let got = format!(
                "[{}, {}) of {:?} and [{}, {}) of {:?}",
                pair[0].start,
                pair[0].end,
                pair[0].namespace,
                pair[1].start,
                pair[1].end,
                pair[1].namespace
            );
            let same = pair[0].namespace == pair[1].namespace;
            let kind = if same { ErrorKind::InvalidArgument } else { ErrorKind::NamespaceConflict };
            return Err(Error::new(kind, "marked segments", expected, got));
        }
        Ok(marks)
    }
}

/// What the indexes hold of a prompt.
struct Found {
    key: KeyId,
    marks: Vec<(Range<usize>, KeyId)>,
    prefix: Vec<BlockId>,
    chain: PrefixMatch,
    /// Positions [whole, prefix_end) continue the prefix inside a block.
    whole: usize,
    prefix_end: usize,
    matches: Matches,
}

fn find(
    index: &mut Index,
    request: &Admission<'_>,
    marks: &[MarkedSegment<'_>],
    page: usize,
) -> Found {
    let key = index.intern(request.namespace, request.regime);
    let marks: Vec<_> = marks
        .iter()
        .map(|mark| (mark.start..mark.end, index.intern(mark.namespace, request.regime)))
        .collect();
    // The last token is always computed: its logits are wanted.
    let last = request.tokens.len() - 1;
    let mut prefix = Vec::new();
    let root = PrefixMatch { parent: Parent::Root, digest: index.root(key), partial: None };
    let chain = match request.reuse {
        Reuse::None => root,
        _ => index.match_prefix(key, &request.tokens[..last], &mut prefix),
    };
    let whole = prefix.len() * page;
    let prefix_end = whole + chain.partial.map_or(0, |(_, tokens)| tokens);
    let mut found =
        Found { key, marks, prefix, chain, whole, prefix_end, matches: Matches::default() };
    found.search(index, request, prefix_end..last);
    found.matches.misses.push((last..last + 1, MissReason::LastToken));
    found
}

impl Found {
    /// Walks marks and the text between them over `clip`.
    fn search(&mut self, index: &Index, request: &Admission<'_>, clip: Range<usize>) {
        let mut at = clip.start;
        for (mark, key) in self.marks.clone() {
            let (start, end) = (mark.start.max(at), mark.end.min(clip.end));
            if start >= end {
                continue;
            }
            self.unmarked(index, request, at..start);
            match request.reuse {
                Reuse::None => self.matches.misses.push((start..end, MissReason::ReuseOff)),
                Reuse::Prefix => self.matches.misses.push((start..end, MissReason::SegmentsOff)),
                Reuse::Segments => {
                    index.match_marked(key, request.tokens, mark, &clip, &mut self.matches);
                }
            }
            at = end;
        }
        self.unmarked(index, request, at..clip.end);
    }

    fn unmarked(&mut self, index: &Index, request: &Admission<'_>, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let reason = match request.reuse {
            Reuse::None => MissReason::ReuseOff,
            Reuse::Segments if request.discover => MissReason::NotCached,
            _ => MissReason::Fresh,
        };
        let mut at = range.start;
        let end = range.end;
        if reason == MissReason::NotCached {
            let first = self.matches.pieces.len();
            index.discover(self.key, request.tokens, range, &mut self.matches.pieces);
            for piece in &self.matches.pieces[first..] {
                self.matches.misses.push((at..piece.start, reason));
                at = piece.end;
            }
        }
        self.matches.misses.push((at..end, reason));
    }

    fn plan(&self, index: &Index, tokens: usize) -> ReusePlan {
        let span = |range: &Range<usize>, outcome| PlanSpan {
            start: range.start,
            end: range.end,
            outcome,
        };
        let mut spans = vec![span(&(0..self.prefix_end), Outcome::Prefix)];
        for piece in &self.matches.pieces {
            let source = match index.frozen.name_of(piece.donor) {
                Some(name) => SegmentSource::Frozen(name.to_string()),
                None => SegmentSource::Request,
            };
            let outcome = Outcome::Segment { delta: piece.delta, source, exact: piece.exact };
            spans.push(span(&(piece.start..piece.end), outcome));
        }
        for (range, reason) in &self.matches.misses {
            spans.push(span(range, Outcome::Recompute { reason: *reason }));
        }
        ReusePlan::new(tokens, spans)
    }

    /// The donors of copies and windows: the block a prefix ends inside, then the segments'.
    fn donors(&self) -> impl Iterator<Item = BlockId> + '_ {
        let partial = self.chain.partial.map(|(block, _)| block);
        partial.into_iter().chain(self.matches.pieces.iter().map(|piece| piece.donor))
    }

    /// The pieces to be copied: the partial prefix always, segments when materialised.
    fn copied(&self, mode: Mode) -> Vec<Piece> {
        let partial = self.chain.partial.map(|(donor, tokens)| Piece {
            start: self.whole,
            end: self.whole + tokens,
            donor,
            begin: 0,
            delta: 0,
            exact: true,
        });
        let segments = match mode {
            Mode::Materialise => &self.matches.pieces[..],
            Mode::Share => &[],
        };
        partial.into_iter().chain(segments.iter().copied()).collect()
    }

    /// Which grid blocks after the prefix need memory of their own.
    fn private_grid(&self, request: &Admission<'_>, page: usize) -> Vec<bool> {
        let end = request.tokens.len() + request.reserve_tokens;
        let first = self.prefix.len();
        let mut needed = vec![true; end.div_ceil(page) - first];
        if request.mode == Mode::Materialise {
            return needed;
        }
        needed.fill(false);
        let mut at = self.whole;
        let pieces = self.matches.pieces.iter().map(|piece| (piece.start, piece.end));
        for (start, stop) in pieces.chain([(end, end)]) {
            if at < start {
                needed[at / page - first..start.div_ceil(page) - first].fill(true);
            }
            at = stop;
        }
        needed
    }
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
    let mut found = find(&mut state.index, request, &marks, page);
    found.matches.pieces.sort_unstable_by_key(|piece| piece.start);
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
