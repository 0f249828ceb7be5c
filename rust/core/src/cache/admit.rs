//! Admission: look up, plan, hold, allocate; all or nothing.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::heads::LocalWindow;
use crate::ids::{BlockId, GroupId};
use crate::plan::Window;
use crate::pool::{SharedBlocks, Stored, WritableBlocks};
use crate::segment::{Index, Piece};

use super::found::{Found, find};
use super::holding::Holding;
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
    /// Rows that are computed at once, for window groups to have room for no more than these and
    /// what they see; 0 for the whole prompt. See [`Request::advance`].
    pub chunk_tokens: usize,
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
            chunk_tokens: 0,
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

/// What a request takes of one head group.
struct Share {
    /// Blocks of the exact prefix that rows after it see; none where they see nothing.
    prefix: Vec<BlockId>,
    donors: Vec<BlockId>,
    /// Which grid blocks after the prefix get memory now.
    grid: Vec<bool>,
    /// The grid block from which on they get it later.
    until: usize,
    /// Private blocks beside these.
    spare: usize,
}

impl Share {
    fn placed(&self) -> usize {
        self.grid.iter().filter(|&&needed| needed).count()
    }

    fn held_prefix(&self) -> Vec<BlockId> {
        self.prefix.iter().copied().filter(|block| block.is_some()).collect()
    }
}

pub(super) fn admit(shared: &Arc<Shared>, request: &Admission<'_>) -> Result<Request, Error> {
    let marks = request.sorted_marks()?;
    let mut stored = shared.store.lock();
    let state = &mut *stored;
    let grown = freeze::regrow(shared, state);
    let found = find(&mut state.index, request, &marks, shared.page_tokens());
    let plan = found.plan(&state.index, request.tokens.len());

    let shares = shares(shared, &state.index, &found, request);
    let mut needs: Vec<usize> = shares.iter().map(|share| share.placed() + share.spare).collect();
    needs.resize(state.pool.group_count(), 0);
    let mut private = Vec::with_capacity(needs.iter().sum());
    for share in &shares {
        state.pool.hold(&share.held_prefix());
        state.pool.hold(&share.donors);
    }
    if let Err(error) = freeze::allocate(shared, state, &needs, &mut private) {
        for share in &shares {
            state.pool.release(&share.donors);
            state.pool.release(&share.held_prefix());
        }
        found.keys().for_each(|key| state.index.release_key(key));
        freeze::let_go(state, &grown);
        return Err(error);
    }
    for anchor in found.prefix.iter().copied().chain(found.donors()) {
        let hits = state.index.count_use(anchor);
        state.pool.note_hits(anchor, hits);
    }
    let mut holdings = Vec::with_capacity(shares.len());
    for (group, share) in shares.into_iter().enumerate() {
        let rest = private.split_off(needs[group]);
        holdings.push(hold(shared, state, &found, (group, share, private), request.mode));
        private = rest;
    }
    let last = found.prefix.last().map(|&block| state.index.link(block));
    let chain = Chain::new(found.chain.parent, last, found.chain.digest, found.prefix.len());
    drop(stored);
    shared.counters.add(&plan);
    Ok(Request {
        shared: Arc::clone(shared),
        namespace: request.namespace.to_owned(),
        regime: request.regime,
        key: found.key,
        marks: found.marks,
        tokens: request.tokens.to_vec(),
        share: request.mode == Mode::Share,
        plan,
        brought_in: false,
        in_chunks: request.chunk_tokens > 0 && holdings.iter().any(|held| held.window.is_some()),
        holdings,
        promoted: Vec::new(),
        read_only: found.prefix.len(),
        front: 0,
        reserved: request.tokens.len() + request.reserve_tokens,
        committed: found.whole,
        exact: found.whole,
        chain,
        before: last,
    })
}

/// Divides an admission up by head group.
fn shares(shared: &Shared, index: &Index, found: &Found, request: &Admission<'_>) -> Vec<Share> {
    let page = shared.page_tokens();
    let total = request.tokens.len();
    let end = total + request.reserve_tokens;
    let several = shared.windows.len() > 1;
    let of = |group: usize, anchor: BlockId| {
        if several { index.row(anchor)[group] } else { anchor }
    };
    let share = |(group, window): (usize, &Option<LocalWindow>)| {
        let donors = found.donors().map(|anchor| of(group, anchor)).collect();
        let Some(window) = *window else {
            let prefix = found.prefix.iter().map(|&anchor| of(group, anchor)).collect();
            let grid = found.private_grid(request.mode, page, end);
            return Share { prefix, donors, grid, until: end.div_ceil(page), spare: 0 };
        };
        let block = |(b, &anchor): (usize, &BlockId)| {
            let seen = window.sees(found.prefix_end, &(b * page..(b + 1) * page));
            if seen { of(group, anchor) } else { BlockId::NONE }
        };
        let prefix = found.prefix.iter().enumerate().map(block).collect();
        let grid = found.private_grid(request.mode, page, total);
        let until = total.div_ceil(page);
        let spare = (end.div_ceil(page) - until).min(window.blocks(page, 1));
        let mut share = Share { prefix, donors, grid, until, spare };
        if request.chunk_tokens > 0 {
            let most = share.placed().min(window.blocks(page, request.chunk_tokens));
            let first = found.prefix_end.saturating_add(request.chunk_tokens).min(total);
            share.until = first.div_ceil(page);
            share.grid[share.until - found.prefix.len()..].fill(false);
            share.spare += most.saturating_sub(share.placed());
        }
        share
    };
    shared.windows.iter().enumerate().map(share).collect()
}

/// Puts what a request takes of one head group into a table.
fn hold(
    shared: &Shared,
    state: &Stored<Index>,
    found: &Found,
    (group, share, mut private): (usize, Share, Vec<BlockId>),
    mode: Mode,
) -> Holding {
    let window = shared.windows[group];
    let mut held = Holding::new(&shared.store, GroupId(group as u8), window, shared.page_tokens());
    let source = |piece: &Piece| {
        let donor = state.index.row(piece.donor)[group];
        let Piece { start, end, begin, delta, .. } = *piece;
        Window { start, end, begin, delta, donor, page: state.pool.page(donor) }
    };
    held.pieces = found.copied(mode).iter().map(source).collect();
    if mode == Mode::Share {
        found.matches.pieces.iter().for_each(|piece| held.table.push_window(source(piece)));
    }
    let page_of = |block: BlockId| if block.is_some() { state.pool.page(block) } else { 0 };
    for &block in &share.prefix {
        held.table.push(block, page_of(block));
    }
    held.quota = private.len();
    held.lost = share.prefix.iter().any(|block| !block.is_some());
    let spare = private.split_off(share.placed());
    let mut blocks = private.iter();
    for (b, &needed) in (share.prefix.len()..).zip(&share.grid) {
        held.table.push(BlockId::NONE, 0);
        if let Some(&block) = if needed { blocks.next() } else { None } {
            held.place(b, block, state.pool.page(block));
        }
    }
    held.placed(share.until);
    held.prefix = SharedBlocks::adopt(&shared.store, share.held_prefix());
    held.donors = SharedBlocks::adopt(&shared.store, share.donors);
    held.private = WritableBlocks::adopt(&shared.store, private);
    held.spare = WritableBlocks::adopt(&shared.store, spare);
    held
}
