//! One admitted prompt: its plan, its blocks, its flat arrays. Dropping it returns everything.

use std::ops::Range;
use std::sync::Arc;

use crate::content::{Digest, Link, Parent};
use crate::error::{Error, ErrorKind};
use crate::ids::{GroupId, ScopeId};
use crate::plan::ReusePlan;

use super::books::Common;
use super::cut::Cut;
use super::holding::Holding;

/// How far the request's exact prefix has been entered into the prefix tree.
#[derive(Clone, Copy)]
pub(super) struct Chain {
    pub(super) parent: Parent,
    /// The parent's identity, if it has one.
    pub(super) link: Option<Link>,
    pub(super) digest: Digest,
    /// Whole blocks entered.
    pub(super) blocks: usize,
}

impl Chain {
    pub(super) fn new(parent: Parent, link: Option<Link>, digest: Digest, blocks: usize) -> Chain {
        Chain { parent, link, digest, blocks }
    }
}

/// An admitted prompt and what it generates.
///
/// `Send`, not shared between threads: one runner drives it. Positions are the request's own. What
/// it reads lies in tables: one a head group, in the groups' order, then one a promoted head.
pub struct Request {
    pub(super) common: Arc<Common>,
    pub(super) namespace: String,
    pub(super) regime: u64,
    pub(super) scope: ScopeId,
    pub(super) marks: Vec<(Range<usize>, ScopeId)>,
    pub(super) publish: bool,
    pub(super) tokens: Vec<u32>,
    pub(super) share: bool,
    pub(super) plan: ReusePlan,
    /// One a table.
    pub(super) holdings: Vec<Holding>,
    /// (layer, KV head) of the tables behind those of the groups.
    pub(super) promoted: Vec<(u32, u32)>,
    /// Grid blocks of the exact prefix: never written.
    pub(super) read_only: usize,
    /// Rows before this one are done.
    pub(super) front: usize,
    /// Goes up whenever a table may have changed, so that copies of tables know when they are old.
    pub(super) revision: u64,
    pub(super) cut: Option<Cut>,
    /// Whether the prompt is still being computed chunk by chunk: until then nobody else may hold
    /// the blocks of window groups, so that giving them up always makes room.
    pub(super) in_chunks: bool,
    /// Its KV was brought in from elsewhere, where windows were cut: the index never learns it.
    pub(super) brought_in: bool,
    /// Positions that admission promised room for.
    pub(super) reserved: usize,
    /// Tokens whose KV the index may have learnt: never written again.
    pub(super) committed: usize,
    pub(super) exact: usize,
    pub(super) chain: Chain,
    /// Grid blocks of which it is known whether they were cached before.
    pub(super) recalled: usize,
    /// The virtual block before the first uncommitted block.
    pub(super) before: Option<Link>,
}

impl Request {
    /// What was reused, what was not, and why.
    #[must_use]
    pub fn plan(&self) -> &ReusePlan {
        &self.plan
    }

    /// Tokens so far: prompt and appended.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Never true: a prompt has a token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Token ids so far.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The namespace of the prompt.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The RoPE regime of the prompt.
    #[must_use]
    pub fn regime(&self) -> u64 {
        self.regime
    }

    /// Tables: one a head group and one a promoted head.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.holdings.len()
    }

    /// Blocks of the first head group that this request alone pays for.
    #[must_use]
    pub fn private_blocks(&self) -> usize {
        self.holdings[0].own_blocks()
    }

    /// Blocks of the first head group that this request reads and others may read as well: its
    /// exact prefix and, while they are held, its segments' donors.
    #[must_use]
    pub fn shared_blocks(&self) -> usize {
        self.holdings[0].shared_blocks()
    }

    /// Bytes of the blocks that this request alone pays for, and of those that it reads and others
    /// may read as well, over all head groups.
    #[must_use]
    pub fn kv_bytes(&self) -> (u64, u64) {
        let page_bytes = self.common.config.shape.page_bytes();
        let bytes = |held: &Holding, blocks: usize| {
            let pages = self.common.groups.pages().get(held.group.index()).map_or(1, |&n| n);
            blocks as u64 * u64::from(pages) * page_bytes
        };
        let own = self.holdings.iter().map(|held| bytes(held, held.own_blocks())).sum();
        let together = self.holdings.iter().map(|held| bytes(held, held.shared_blocks())).sum();
        (own, together)
    }

    /// The KV view of [0, len) in the first table: `[block, begin, end, position, delta]`.
    #[must_use]
    pub fn entries(&self) -> Vec<[i32; 5]> {
        self.holdings[0].table.entries(self.len())
    }

    /// The KV view of one table; that of a window group lists what is kept.
    ///
    /// # Errors
    /// `OutOfRange` if there is no such table.
    pub fn entries_of(&self, table: usize) -> Result<Vec<[i32; 5]>, Error> {
        self.check_table(table)?;
        Ok(self.holdings[table].table.entries(self.len()))
    }

    pub(super) fn check_table(&self, table: usize) -> Result<(), Error> {
        let tables = self.tables();
        if table >= tables {
            return Err(Error::out_of_range("table", format!("table < {tables}"), table));
        }
        Ok(())
    }

    /// Copies to be executed before the request is read, in the first head group:
    /// `[src_block, src_slot, dst_block, dst_slot, count, delta]`. Their sources stay held until
    /// [`Self::finish_copies`]. A second call returns what has come up since.
    pub fn take_copies(&mut self) -> Vec<[i32; 6]> {
        self.holdings[0].copies.take_rows()
    }

    /// The copies of one head group.
    ///
    /// # Errors
    /// `OutOfRange` if there is no such group.
    pub fn take_copies_of(&mut self, group: GroupId) -> Result<Vec<[i32; 6]>, Error> {
        self.check_table(group.index())?;
        Ok(self.holdings[group.index()].copies.take_rows())
    }

    /// Says that all copies that were taken have been executed; lets go of their sources. In
    /// share mode the segments' donors stay held: they are read in place. So do those of pieces
    /// whose blocks get memory later.
    pub fn finish_copies(&mut self) {
        if self.copies_taken("copies").is_err() {
            return;
        }
        let mut gone = Vec::new();
        for held in &mut self.holdings {
            held.replaced.clear();
            let waits = self.share && held.window.is_none();
            if !waits && !held.donors.blocks().is_empty() {
                gone.extend(held.drop_donors());
            }
        }
        if !gone.is_empty() {
            self.common.store.lock().pool.release(&gone);
        }
    }

    pub(super) fn copies_taken(&self, what: &str) -> Result<(), Error> {
        let left = self.holdings.iter().map(|held| held.copies.len()).sum::<usize>();
        if left > 0 {
            return Err(Error::invalid(what, "take_copies() and their execution first", {
                format!("{left} copies not taken")
            }));
        }
        Ok(())
    }

    /// Where the K, V of each position go in the first table: `[block, slot]`.
    ///
    /// # Errors
    /// `OutOfRange` for a position outside [0, len), `NotWritable` for one whose KV others may
    /// read: exact prefix, donor window, committed, or shared with a fork.
    pub fn slots(&self, positions: &[i32]) -> Result<Vec<[i32; 2]>, Error> {
        self.slots_of(0, positions)
    }

    /// Where the K, V of each position go in one table; `[-1, -1]` where a window group keeps
    /// nothing.
    ///
    /// # Errors
    /// As [`Self::slots`].
    pub fn slots_of(&self, table: usize, positions: &[i32]) -> Result<Vec<[i32; 2]>, Error> {
        self.check_table(table)?;
        let held = &self.holdings[table];
        let page = self.common.page_tokens();
        let stored = self.common.store.lock();
        let mut slots = Vec::with_capacity(positions.len());
        let mut writable = usize::MAX;
        for &position in positions {
            let at = self.position(position)?;
            let b = at / page;
            let block = held.table.block(b);
            if b != writable {
                let forked = block.is_some_and(|block| stored.pool.owners(block) != 1);
                let lost = block.is_none() && held.window.is_none();
                if b < self.read_only || forked || lost {
                    return Err(self.not_writable(table, at));
                }
                writable = b;
            }
            if at < self.committed || self.is_read_from_donor(table, at) {
                return Err(self.not_writable(table, at));
            }
            slots.push(match block {
                Some(_) => [held.table.page(b), (at - b * page) as i32],
                None => [-1, -1],
            });
        }
        Ok(slots)
    }

    pub(super) fn position(&self, position: i32) -> Result<usize, Error> {
        usize::try_from(position).ok().filter(|&at| at < self.len()).ok_or_else(|| {
            let expected = format!("0 <= position < {}", self.len());
            Error::out_of_range("position", expected, position)
        })
    }

    fn is_read_from_donor(&self, table: usize, at: usize) -> bool {
        self.share && self.holdings[table].table.donors_in(at..at + 1).next().is_some()
    }

    pub(super) fn not_writable(&self, table: usize, at: usize) -> Error {
        let b = at / self.common.page_tokens();
        let got = if b < self.read_only {
            "a position of the exact prefix"
        } else if self.is_read_from_donor(table, at) {
            "a position read from a donor; see make_writable"
        } else if at < self.committed {
            "a committed position"
        } else {
            "a position shared with a fork; see make_writable"
        };
        let expected = "a position in a block of this request alone";
        Error::new(ErrorKind::NotWritable, format!("position {at}"), expected, got)
    }

    /// The namespace in which a span is found again: a mark's if it lies wholly inside, and may be.
    pub(super) fn content_scope(&self, span: &Range<usize>) -> ScopeId {
        let inside =
            |mark: &Range<usize>| self.publish && mark.start <= span.start && span.end <= mark.end;
        self.marks.iter().find(|(mark, _)| inside(mark)).map_or(self.scope, |&(_, scope)| scope)
    }

    /// A second request with the same tokens: all blocks are shared, and copied by whichever
    /// side writes first.
    ///
    /// # Errors
    /// `InvalidArgument` if copies have not been taken (the fork would read blocks not yet
    /// filled), the prompt is still computed in chunks, heads have been promoted, or some of its
    /// KV was spilled.
    pub fn fork(&self) -> Result<Request, Error> {
        self.copies_taken("fork")?;
        self.chunks_done("fork")?;
        self.resident("fork")?;
        if !self.promoted.is_empty() {
            let got = format!("{} of them", self.promoted.len());
            return Err(Error::invalid("fork", "a request without promoted heads", got));
        }
        let store = &self.common.store;
        {
            let mut stored = store.lock();
            self.scopes().for_each(|scope| stored.index.hold_scope(scope));
        }
        Ok(Request {
            common: Arc::clone(&self.common),
            namespace: self.namespace.clone(),
            regime: self.regime,
            scope: self.scope,
            marks: self.marks.clone(),
            publish: self.publish,
            tokens: self.tokens.clone(),
            share: self.share,
            plan: self.plan.clone(),
            holdings: self.holdings.iter().map(|held| held.fork(store)).collect(),
            promoted: Vec::new(),
            read_only: self.read_only,
            front: self.front,
            revision: 0,
            cut: None,
            in_chunks: false,
            brought_in: self.brought_in,
            reserved: 0,
            committed: self.committed,
            exact: self.exact,
            chain: self.chain,
            recalled: self.recalled,
            before: self.before,
        })
    }

    /// The namespaces of the prompt and of its marks: held, so that their numbers stay theirs.
    fn scopes(&self) -> impl Iterator<Item = ScopeId> + '_ {
        std::iter::once(self.scope).chain(self.marks.iter().map(|&(_, scope)| scope))
    }

    /// Refuses what would give others a hold on blocks of a prompt that is still in chunks.
    pub(super) fn chunks_done(&self, what: &str) -> Result<(), Error> {
        if self.in_chunks {
            let got = format!("rows from {} on to come", self.front);
            return Err(Error::invalid(what, "a prompt whose chunks are all computed", got));
        }
        Ok(())
    }

    /// Says that the KV of this request was brought in from elsewhere, of window groups only what
    /// the next tokens see: it decodes on, and [`Self::commit`] is refused from now on, here and in
    /// its forks.
    pub fn bring_in(&mut self) {
        self.brought_in = true;
    }

    /// What the heads of a layer read: `[table, rank, window, sink]` a KV head.
    ///
    /// # Errors
    /// `OutOfRange` if the model has no such layer.
    pub fn head_rows(&self, layer: u32) -> Result<Vec<[i32; 4]>, Error> {
        let mut rows = self.common.groups.head_rows(layer)?;
        let first = self.common.groups.len();
        for (table, &(_, head)) in (first..).zip(&self.promoted).filter(|(_, at)| at.0 == layer) {
            rows[head as usize] = [table as i32, 0, 0, 0];
        }
        Ok(rows)
    }

    /// Heads of window groups that are full for this request, as (layer, KV head), in the order
    /// of their tables.
    #[must_use]
    pub fn promoted(&self) -> &[(u32, u32)] {
        &self.promoted
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let mut stored = self.common.store.lock();
        self.scopes().for_each(|scope| stored.index.release_scope(scope));
        if self.in_chunks {
            for held in self.holdings.iter().filter(|held| held.window.is_some()) {
                let private = held.private.blocks().iter();
                private.for_each(|&block| stored.index.withhold(block, false));
            }
        }
    }
}
