//! One admitted prompt: its plan, its blocks, its flat arrays. Dropping it returns everything.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::ids::{GroupId, KeyId};
use crate::plan::{BlockTable, ReusePlan};
use crate::pool::{SharedBlocks, WritableBlocks};
use crate::segment::{Digest, Index, Link, Parent};

use super::Shared;

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
/// `Send`, not shared between threads: one runner drives it. Positions are the request's own.
pub struct Request {
    pub(super) shared: Arc<Shared>,
    pub(super) namespace: String,
    pub(super) key: KeyId,
    pub(super) marks: Vec<(Range<usize>, KeyId)>,
    pub(super) tokens: Vec<u32>,
    pub(super) share: bool,
    pub(super) plan: ReusePlan,
    pub(super) table: BlockTable,
    /// Grid blocks of the exact prefix: never written.
    pub(super) read_only: usize,
    /// Tokens whose KV the index may have learnt: never written again.
    pub(super) committed: usize,
    pub(super) exact: usize,
    pub(super) chain: Chain,
    /// The virtual block before the first uncommitted block.
    pub(super) before: Option<Link>,
    pub(super) copies: Vec<Vec<[i32; 6]>>,
    /// Dropped before the prefix, so that the tail is evicted before it.
    pub(super) private: WritableBlocks<Index>,
    /// Blocks that were copied away from, held until the copies are done.
    pub(super) replaced: Vec<SharedBlocks<Index>>,
    pub(super) donors: Option<SharedBlocks<Index>>,
    pub(super) prefix: SharedBlocks<Index>,
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

    /// Blocks of the first head group that this request alone pays for.
    #[must_use]
    pub fn private_blocks(&self) -> usize {
        self.private.blocks().len() / self.shared.groups.len()
    }

    /// Blocks of the first head group that this request reads and others may read as well: its
    /// exact prefix and, while they are held, its segments' donors.
    #[must_use]
    pub fn shared_blocks(&self) -> usize {
        let donors = self.donors.as_ref().map_or(0, |donors| donors.blocks().len());
        (self.prefix.blocks().len() + donors) / self.shared.groups.len()
    }

    /// The KV view of [0, len) in the first head group: `[block, begin, end, position, delta]`.
    #[must_use]
    pub fn entries(&self) -> Vec<[i32; 5]> {
        self.table.entries(self.len(), 0)
    }

    /// The KV view of one head group.
    ///
    /// # Errors
    /// `OutOfRange` if there is no such group.
    pub fn entries_of(&self, group: GroupId) -> Result<Vec<[i32; 5]>, Error> {
        self.check_group(group)?;
        Ok(self.table.entries(self.len(), group.index()))
    }

    fn check_group(&self, group: GroupId) -> Result<(), Error> {
        let groups = self.shared.groups.len();
        if group.index() >= groups {
            return Err(Error::out_of_range("head group", format!("group < {groups}"), group.0));
        }
        Ok(())
    }

    /// Copies to be executed before the request is read, in the first head group:
    /// `[src_block, src_slot, dst_block, dst_slot, count, delta]`. Their sources stay held until
    /// [`Self::finish_copies`]. A second call returns what has come up since.
    pub fn take_copies(&mut self) -> Vec<[i32; 6]> {
        std::mem::take(&mut self.copies[0])
    }

    /// The copies of one head group.
    ///
    /// # Errors
    /// `OutOfRange` if there is no such group.
    pub fn take_copies_of(&mut self, group: GroupId) -> Result<Vec<[i32; 6]>, Error> {
        self.check_group(group)?;
        Ok(std::mem::take(&mut self.copies[group.index()]))
    }

    /// Says that all copies that were taken have been executed; lets go of their sources. In
    /// share mode the segments' donors stay held: they are read in place.
    pub fn finish_copies(&mut self) {
        if self.copies.iter().all(Vec::is_empty) {
            self.replaced.clear();
            if !self.share {
                self.donors = None;
            }
        }
    }

    pub(super) fn copies_taken(&self, what: &str) -> Result<(), Error> {
        let left = self.copies.iter().map(Vec::len).sum::<usize>();
        if left > 0 {
            return Err(Error::invalid(what, "take_copies() and their execution first", {
                format!("{left} copies not taken")
            }));
        }
        Ok(())
    }

    /// Where the K, V of each position go in the first head group: `[block, slot]`.
    ///
    /// # Errors
    /// `OutOfRange` for a position outside [0, len), `NotWritable` for one whose KV others may
    /// read: exact prefix, donor window, committed, or shared with a fork.
    pub fn slots(&self, positions: &[i32]) -> Result<Vec<[i32; 2]>, Error> {
        self.slots_of(GroupId(0), positions)
    }

    /// Where the K, V of each position go in one head group.
    ///
    /// # Errors
    /// As [`Self::slots`].
    pub fn slots_of(&self, group: GroupId, positions: &[i32]) -> Result<Vec<[i32; 2]>, Error> {
        self.check_group(group)?;
        let page = self.shared.page_tokens();
        let stored = self.shared.store.lock();
        let mut slots = Vec::with_capacity(positions.len());
        let mut writable = usize::MAX;
        for &position in positions {
            let at = self.position(position)?;
            let b = at / page;
            if b != writable {
                let row = self.table.row(b).filter(|_| b >= self.read_only);
                let alone = |row: &&[_]| row.iter().all(|&block| stored.pool.owners(block) == 1);
                if row.filter(alone).is_none() {
                    return Err(self.not_writable(at));
                }
                writable = b;
            }
            if at < self.committed || self.is_window(at) {
                return Err(self.not_writable(at));
            }
            slots.push([self.table.page(b, group.index()), (at - b * page) as i32]);
        }
        Ok(slots)
    }

    pub(super) fn position(&self, position: i32) -> Result<usize, Error> {
        usize::try_from(position).ok().filter(|&at| at < self.len()).ok_or_else(|| {
            let expected = format!("0 <= position < {}", self.len());
            Error::out_of_range("position", expected, position)
        })
    }

    fn is_window(&self, at: usize) -> bool {
        self.share && self.table.windows_in(at..at + 1).next().is_some()
    }

    pub(super) fn not_writable(&self, at: usize) -> Error {
        let b = at / self.shared.page_tokens();
        let got = if b < self.read_only {
            "a position of the exact prefix"
        } else if self.is_window(at) {
            "a position read from a donor; see make_writable"
        } else if at < self.committed {
            "a committed position"
        } else {
            "a position shared with a fork; see make_writable"
        };
        let expected = "a position in a block of this request alone";
        Error::new(ErrorKind::NotWritable, format!("position {at}"), expected, got)
    }

    /// Whether the whole of grid block `b` is stored in a block that this request allocated.
    pub(super) fn is_own(&self, b: usize) -> bool {
        b >= self.read_only && self.table.own(b).is_some()
    }

    /// The namespace in which a span is found again: a mark's if it lies wholly inside.
    pub(super) fn content_key(&self, span: &Range<usize>) -> KeyId {
        let inside = |mark: &Range<usize>| mark.start <= span.start && span.end <= mark.end;
        self.marks.iter().find(|(mark, _)| inside(mark)).map_or(self.key, |&(_, key)| key)
    }

    /// A second request with the same tokens: all blocks are shared, and copied by whichever
    /// side writes first.
    ///
    /// # Errors
    /// `InvalidArgument` if copies have not been taken: the fork would read blocks not yet filled.
    pub fn fork(&self) -> Result<Request, Error> {
        self.copies_taken("fork")?;
        Ok(Request {
            shared: Arc::clone(&self.shared),
            namespace: self.namespace.clone(),
            key: self.key,
            marks: self.marks.clone(),
            tokens: self.tokens.clone(),
            share: self.share,
            plan: self.plan.clone(),
            table: self.table.clone(),
            read_only: self.read_only,
            committed: self.committed,
            exact: self.exact,
            chain: self.chain,
            before: self.before,
            copies: vec![Vec::new(); self.shared.groups.len()],
            prefix: self.prefix.clone(),
            donors: self.donors.clone(),
            replaced: Vec::new(),
            private: self.private.fork(),
        })
    }
}
