//! Taking back what was appended: the tokens of a guess that turned out wrong.
//!
//! A step that guesses ahead appends tokens before it knows them. Those that were right become what
//! they are, and the others are taken back: their blocks return, and nobody ever finds them, as
//! only what was committed can be found.

use crate::error::{Error, ErrorKind};
use crate::ids::BlockId;

use super::books::State;
use super::cut::Cut;
use super::holding::Holding;
use super::request::Request;

impl Request {
    /// Takes back the tokens behind the first `len`, as if they had never been appended: their
    /// blocks return to the pool, but for those that admission promised. Lists of entries that
    /// [`DecodeRows`] keep go on from there.
    ///
    /// The row at `len` comes next, and window groups still have what it sees.
    ///
    /// # Errors
    /// `OutOfRange` for more tokens than there are, fewer than the prompt has, or, where a head
    /// group has a window, fewer than it had when the newest were appended, or fewer than lie in
    /// the host's memory and a token more; `NotWritable` where some were committed;
    /// `InvalidArgument` if copies have not been taken, or the prompt is still computed in chunks.
    /// Nothing has changed then.
    ///
    /// [`DecodeRows`]: super::DecodeRows
    pub fn truncate(&mut self, len: usize) -> Result<(), Error> {
        self.copies_taken("truncate")?;
        self.chunks_done("truncate")?;
        let away = self.holdings.iter().map(|held| held.away).max().unwrap_or(0);
        let windows = self.holdings.iter().any(|held| held.window.is_some());
        let least = if windows { self.front.max(self.plan.tokens) } else { self.plan.tokens };
        // What comes next is written behind whole blocks that were spilled.
        let least = if away > 0 { least.max(away + 1) } else { least };
        if len < least || len > self.len() {
            let expected = format!("{least} <= tokens <= {}", self.len());
            return Err(Error::out_of_range("truncate", expected, len));
        }
        self.uncommitted("truncate", len)?;
        if len == self.len() {
            return Ok(());
        }
        let page = self.common.page_tokens();
        let promised = self.reserved.div_ceil(page);
        let reserve = self.reserve_left(len);
        let common = self.common.clone();
        let mut stored = common.store.lock();
        for held in &mut self.holdings {
            let grid = len.div_ceil(page);
            let keep = if held.window.is_some() { grid } else { grid.max(promised) };
            held.cut(&mut stored, keep);
            if let Some(window) = held.window {
                held.trim(&mut stored, reserve.min(window.blocks(page, 1)));
            }
        }
        drop(stored);
        self.tokens.truncate(len);
        self.front = self.front.min(len);
        self.note_cut(len);
        Ok(())
    }

    /// Says which tokens those from `start` on are that were appended before they were known.
    ///
    /// # Errors
    /// `OutOfRange` for tokens of the prompt, or behind the last; `NotWritable` where some were
    /// committed. Nothing has changed then.
    pub fn set_tokens(&mut self, start: usize, tokens: &[u32]) -> Result<(), Error> {
        let end = start.saturating_add(tokens.len());
        if start < self.plan.tokens || end > self.len() {
            let expected = format!("{} <= start <= end <= {}", self.plan.tokens, self.len());
            return Err(Error::out_of_range("tokens", expected, format!("[{start}, {end})")));
        }
        self.uncommitted("tokens", start)?;
        self.tokens[start..end].copy_from_slice(tokens);
        Ok(())
    }

    /// Tokens of this request that copies of its tables still have right, made at a revision of it;
    /// none if more than its end has changed since.
    pub(super) fn unchanged_since(&self, revision: u64, len: usize) -> Option<usize> {
        if revision == self.revision {
            return Some(len);
        }
        self.cut.filter(|cut| cut.spans(revision, self.revision)).map(|cut| cut.len.min(len))
    }

    fn note_cut(&mut self, len: usize) {
        self.cut = Some(Cut::after(self.cut, self.revision, len));
        self.revision += 1;
    }

    fn uncommitted(&self, what: &str, len: usize) -> Result<(), Error> {
        if len < self.committed {
            let expected = format!("tokens behind the {} that others may find", self.committed);
            return Err(Error::new(ErrorKind::NotWritable, what, expected, len));
        }
        Ok(())
    }
}

impl Holding {
    /// Keeps the first grid blocks; whatever stood for the others goes back.
    fn cut(&mut self, state: &mut State, keep: usize) {
        let gone: Vec<BlockId> = self.table.cut(keep);
        if gone.is_empty() {
            return;
        }
        let gone = self.private.part_with(&gone);
        if self.window.is_none() {
            state.pool.disown(&gone);
            state.pool.release(&gone);
            return;
        }
        // What nobody else holds may be promised still.
        let (again, shared): (Vec<BlockId>, Vec<BlockId>) = gone
            .into_iter()
            .partition(|&block| state.pool.references(block) == 1 && !state.pool.is_indexed(block));
        self.spare.extend(&again);
        state.pool.disown(&shared);
        state.pool.release(&shared);
    }
}
