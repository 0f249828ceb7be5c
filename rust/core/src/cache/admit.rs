//! Admission: look up, plan, hold, allocate; all or nothing.

use std::sync::Arc;

use crate::content::{ContentId, DocumentBlock, Index, Piece};
use crate::error::Error;
use crate::heads::LocalWindow;
use crate::ids::{BlockId, GroupId};
use crate::plan::DonorRange;
use crate::pool::{SharedBlocks, Stored, WritableBlocks};

use super::admission::{Admission, MarkedSegment, Mode};
use super::books::{Common, State};
use super::found::{Found, find};
use super::freeze;
use super::holding::Holding;
use super::request::{Chain, Request};

/// What a request takes of one head group.
struct GroupNeed {
    /// Blocks of the exact prefix that rows after it see; none where they see nothing.
    prefix: Vec<BlockId>,
    /// Those of them that are there.
    held_prefix: Vec<BlockId>,
    donors: Vec<BlockId>,
    /// Which grid blocks after the prefix get memory now.
    grid: Vec<bool>,
    /// The grid block from which on they get it later.
    until: usize,
    /// Private blocks beside these.
    spare: usize,
}

impl GroupNeed {
    fn placed(&self) -> usize {
        self.grid.iter().filter(|&&needed| needed).count()
    }
}

/// A prompt that was looked up: what is there of it is held, what is not has no blocks yet.
pub(super) struct LookedUp {
    pub(super) found: Found,
    group_needs: Vec<GroupNeed>,
    /// Blocks of each group of the pool that it takes.
    pub(super) needs: Vec<usize>,
    /// Blocks of documents that came back before.
    grown: Vec<(ContentId, DocumentBlock)>,
}

impl LookedUp {
    /// Looks a prompt up and holds what is there of it.
    pub(super) fn hold(
        common: &Common,
        state: &mut State,
        request: &Admission<'_>,
        marks: &[MarkedSegment<'_>],
    ) -> LookedUp {
        let grown = freeze::regrow(common, state);
        let found = find(&mut state.index, request, marks, common.page_tokens());
        let group_needs = group_needs(common, &state.index, &found, request);
        let mut needs: Vec<usize> =
            group_needs.iter().map(|need| need.placed() + need.spare).collect();
        needs.resize(state.pool.group_count(), 0);
        for need in &group_needs {
            state.pool.hold(&need.held_prefix);
            state.pool.hold(&need.donors);
        }
        LookedUp { found, group_needs, needs, grown }
    }

    /// Undoes [`Self::hold`].
    pub(super) fn let_go(self, state: &mut State) {
        for need in &self.group_needs {
            state.pool.release(&need.donors);
            state.pool.release(&need.held_prefix);
        }
        self.found.scopes().for_each(|scope| state.index.release_scope(scope));
        freeze::let_go(state, &self.grown);
    }
}

pub(super) fn admit(common: &Arc<Common>, request: &Admission<'_>) -> Result<Request, Error> {
    let marks = request.sorted_marks()?;
    let mut stored = common.store.lock();
    let state = &mut *stored;
    let looked_up = LookedUp::hold(common, state, request, &marks);
    let plan = looked_up.found.plan(&state.index, request.tokens.len());

    // Before anything is evicted: a link to what goes then leads nowhere.
    let last = looked_up.found.prefix.last().map(|&content| state.index.link(content));
    let mut private = Vec::with_capacity(looked_up.needs.iter().sum());
    if let Err(error) = freeze::allocate(common, state, &looked_up.needs, &mut private) {
        looked_up.let_go(state);
        return Err(error);
    }
    let LookedUp { found, group_needs, needs, .. } = looked_up;
    // Only blocks of knowledge bases are ranked by their hits. What no row sees of the prefix is
    // not held, and may have had to make room.
    let ranked = state.index.frozen.resident() > 0;
    for content in found.prefix.iter().copied().chain(found.donors()) {
        if let Some(hits) = state.index.count_use(content).filter(|_| ranked) {
            state.pool.note_hits(state.index.block(content, 0), hits);
        }
    }
    let mut holdings = Vec::with_capacity(group_needs.len());
    for (group, need) in group_needs.into_iter().enumerate() {
        let rest = private.split_off(needs[group]);
        holdings.push(hold(common, state, &found, (group, need, private), request.mode));
        private = rest;
    }
    let chain = Chain::new(found.chain.parent, last, found.chain.digest, found.prefix.len());
    drop(stored);
    common.counters.add(&plan);
    Ok(Request {
        common: Arc::clone(common),
        namespace: request.namespace.to_owned(),
        regime: request.regime,
        scope: found.scope,
        marks: found.marks,
        publish: request.publish,
        tokens: request.tokens.to_vec(),
        share: request.mode == Mode::Share,
        plan,
        brought_in: false,
        in_chunks: request.chunk_tokens > 0 && holdings.iter().any(|held| held.window.is_some()),
        holdings,
        promoted: Vec::new(),
        read_only: found.prefix.len(),
        front: 0,
        revision: 0,
        cut: None,
        reserved: request.tokens.len() + request.reserve_tokens,
        committed: found.whole,
        exact: found.whole,
        chain,
        recalled: found.prefix.len(),
        before: last,
    })
}

/// Divides an admission up by head group.
fn group_needs(
    common: &Common,
    index: &Index,
    found: &Found,
    request: &Admission<'_>,
) -> Vec<GroupNeed> {
    let page = common.page_tokens();
    let total = request.tokens.len();
    let end = total + request.reserve_tokens;
    let of = |group: usize, content: ContentId| index.block(content, group);
    let need = |(group, window): (usize, &Option<LocalWindow>)| {
        let donors = found.donors().map(|content| of(group, content)).collect();
        let Some(window) = *window else {
            let prefix: Vec<_> = found.prefix.iter().map(|&content| of(group, content)).collect();
            let held_prefix = prefix.clone();
            let (grid, until) = (found.private_grid(request.mode, page, end), end.div_ceil(page));
            return GroupNeed { prefix, held_prefix, donors, grid, until, spare: 0 };
        };
        let block = |(b, &content): (usize, &ContentId)| {
            let seen = window.sees(found.prefix_end, &(b * page..(b + 1) * page));
            if seen { of(group, content) } else { BlockId::NONE }
        };
        let prefix: Vec<_> = found.prefix.iter().enumerate().map(block).collect();
        let held_prefix = prefix.iter().copied().filter(|block| block.is_some()).collect();
        let grid = found.private_grid(request.mode, page, total);
        let until = total.div_ceil(page);
        let spare = (end.div_ceil(page) - until).min(window.blocks(page, 1));
        let mut need = GroupNeed { prefix, held_prefix, donors, grid, until, spare };
        if request.chunk_tokens > 0 {
            let most = need.placed().min(window.blocks(page, request.chunk_tokens));
            let first = found.prefix_end.saturating_add(request.chunk_tokens).min(total);
            need.until = first.div_ceil(page);
            need.grid[need.until - found.prefix.len()..].fill(false);
            need.spare += most.saturating_sub(need.placed());
        }
        need
    };
    common.windows.iter().enumerate().map(need).collect()
}

/// Puts what a request takes of one head group into a table.
fn hold(
    common: &Common,
    state: &Stored<Index>,
    found: &Found,
    (group, need, mut private): (usize, GroupNeed, Vec<BlockId>),
    mode: Mode,
) -> Holding {
    let window = common.windows[group];
    let mut held = Holding::new(&common.store, GroupId(group as u8), window, common.page_tokens());
    let source = |piece: &Piece| {
        let donor = state.index.row(piece.donor)[group];
        let Piece { start, end, begin, delta, .. } = *piece;
        DonorRange { start, end, begin, delta, donor, page: state.pool.page(donor) }
    };
    held.pieces = found.copied(mode).iter().map(source).collect();
    if mode == Mode::Share {
        found.matches.pieces.iter().for_each(|piece| held.table.push_donor(source(piece)));
    }
    let page_of = |block: BlockId| if block.is_some() { state.pool.page(block) } else { 0 };
    held.table.extend(need.prefix.iter().map(|&block| (block, page_of(block))));
    held.chunk_blocks = private.len();
    held.lost = need.held_prefix.len() < need.prefix.len();
    let spare = private.split_off(need.placed());
    let mut blocks = private.iter();
    for (b, &needed) in (need.prefix.len()..).zip(&need.grid) {
        held.table.push(BlockId::NONE, 0);
        if let Some(&block) = if needed { blocks.next() } else { None } {
            held.place(b, block, state.pool.page(block));
        }
    }
    held.placed(need.until);
    held.prefix = SharedBlocks::adopt(&common.store, need.held_prefix);
    held.donors = SharedBlocks::adopt(&common.store, need.donors);
    held.private = WritableBlocks::adopt(&common.store, private);
    held.spare = WritableBlocks::adopt(&common.store, spare);
    held
}
