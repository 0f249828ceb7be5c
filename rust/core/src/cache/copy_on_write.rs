//! Making blocks private before they are written, and room for tokens that are generated.

use std::ops::Range;

use crate::error::Error;
use crate::ids::BlockId;
use crate::pool::Stored;
use crate::segment::Index;

use super::freeze;
use super::request::Request;

type Copies = Vec<Vec<[i32; 6]>>;

impl Request {
    /// Makes the blocks of these positions private: what donors or a fork's other side hold in
    /// them is to be copied by the returned copies (first head group), before anything is written.
    /// Empty where the blocks are private already, as always in materialise mode without forks.
    ///
    /// # Errors
    /// `OutOfRange`, `NotWritable` for the exact prefix and committed positions, `PoolFull`.
    /// Nothing has changed then.
    pub fn make_writable(&mut self, positions: &[i32]) -> Result<Vec<[i32; 6]>, Error> {
        let mut copies = self.make_writable_groups(positions)?;
        let first = std::mem::take(&mut copies[0]);
        for (pending, copies) in self.copies.iter_mut().zip(copies) {
            pending.extend(copies);
        }
        Ok(first)
    }

    fn make_writable_groups(&mut self, positions: &[i32]) -> Result<Copies, Error> {
        let page = self.shared.page_tokens();
        let mut touched = Vec::with_capacity(positions.len());
        for &position in positions {
            let at = self.position(position)?;
            if at / page < self.read_only || at < self.committed {
                return Err(self.not_writable(at));
            }
            touched.push(at / page);
        }
        touched.sort_unstable();
        touched.dedup();
        let shared = self.shared.clone();
        let mut stored = shared.store.lock();
        touched.retain(|&b| !self.is_own(b) || self.is_forked(&stored, b));
        let needs_row = |b: &usize| self.table.row(*b).is_none() || self.is_forked(&stored, *b);
        let fresh = touched.iter().filter(|b| needs_row(b)).count();
        let rows = self.allocate(&mut stored, fresh)?;
        let mut copies = vec![Vec::new(); shared.groups.len()];
        let mut rows = rows.chunks_exact(shared.groups.len());
        let mut replaced = Vec::new();
        for b in touched {
            let moves = self.table.row(b).is_none() || self.is_forked(&stored, b);
            if moves && let Some(row) = rows.next() {
                self.move_block(&stored, b, row, &mut replaced, &mut copies);
            }
            self.copy_windows(b, &mut copies);
        }
        drop(stored);
        self.retire(&replaced);
        Ok(copies)
    }

    fn is_forked(&self, state: &Stored<Index>, b: usize) -> bool {
        b >= self.read_only && self.table.row(b).is_some_and(|row| state.pool.owners(row[0]) > 1)
    }

    fn allocate(&self, state: &mut Stored<Index>, rows: usize) -> Result<Vec<BlockId>, Error> {
        let mut blocks = Vec::new();
        freeze::relieve(&self.shared, state, rows);
        state.pool.allocate(rows, &mut state.index, &mut blocks)?;
        Ok(blocks)
    }

    /// Puts a fresh row in place of grid block `b` and plans the copy of what was stored there.
    fn move_block(
        &mut self,
        state: &Stored<Index>,
        b: usize,
        row: &[BlockId],
        replaced: &mut Vec<BlockId>,
        copies: &mut Copies,
    ) {
        let page = self.shared.page_tokens();
        let pages: Vec<i32> = row.iter().map(|&block| state.pool.page(block)).collect();
        if let Some(old) = self.table.row(b) {
            replaced.extend_from_slice(old);
            let end = self.len().min((b + 1) * page);
            for held in self.stored_runs(b * page..end) {
                let slot = (held.start - b * page) as i32;
                let count = held.len() as i32;
                for (group, copies) in copies.iter_mut().enumerate() {
                    let old = self.table.page(b, group);
                    copies.push([old, slot, pages[group], slot, count, 0]);
                }
            }
        }
        self.table.replace(b, row, |block| state.pool.page(block));
        self.private.extend(row);
    }

    /// The parts of a range that no donor window covers.
    fn stored_runs(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut runs = Vec::new();
        let mut at = range.start;
        for window in self.table.windows_in(range.clone()) {
            runs.push(at..window.start);
            at = window.end;
        }
        runs.push(at..range.end);
        runs.retain(|run| !run.is_empty());
        runs
    }

    /// Copies what donors hold of grid block `b` into it and stops reading the donors there.
    fn copy_windows(&mut self, b: usize, copies: &mut Copies) {
        let page = self.shared.page_tokens();
        let span = b * page..(b + 1) * page;
        for window in self.table.windows_in(span.clone()) {
            for (group, copies) in copies.iter_mut().enumerate() {
                copies.push([
                    self.table.donor_page(&window, group),
                    window.begin as i32,
                    self.table.page(b, group),
                    (window.start - span.start) as i32,
                    (window.end - window.start) as i32,
                    window.delta,
                ]);
            }
        }
        self.table.uncover(&span);
    }

    /// Keeps blocks that were copied away from until the copies are done.
    fn retire(&mut self, replaced: &[BlockId]) {
        if !replaced.is_empty() {
            let held = self.private.share_some(replaced);
            self.replaced.push(held);
        }
    }

    /// Appends generated tokens and makes room for their KV, all or nothing. If a fork shares the
    /// last block, it is copied first: see [`Self::take_copies`].
    ///
    /// # Errors
    /// `PoolFull`, or `InvalidArgument` above 2^31 positions. Nothing has changed then.
    pub fn append(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let page = self.shared.page_tokens();
        let len = self.len() + tokens.len();
        if i32::try_from(len).is_err() {
            return Err(Error::invalid("append", "at most 2147483647 positions", len));
        }
        if tokens.is_empty() {
            return Ok(());
        }
        let shared = self.shared.clone();
        let mut stored = shared.store.lock();
        let growth = len.div_ceil(page).saturating_sub(self.table.len());
        // Reserved blocks that a fork shares are written from here on too.
        let written = self.len() / page..len.div_ceil(page).min(self.table.len());
        let forked: Vec<usize> = written.filter(|&b| self.is_forked(&stored, b)).collect();
        let rows = self.allocate(&mut stored, growth + forked.len())?;
        let mut rows = rows.chunks_exact(shared.groups.len());
        let mut replaced = Vec::new();
        let mut copies = vec![Vec::new(); shared.groups.len()];
        for (b, row) in forked.into_iter().zip(&mut rows) {
            self.move_block(&stored, b, row, &mut replaced, &mut copies);
        }
        for row in rows {
            self.table.push(Some(row), |block| stored.pool.page(block));
            self.private.extend(row);
        }
        drop(stored);
        self.retire(&replaced);
        for (pending, copies) in self.copies.iter_mut().zip(copies) {
            pending.extend(copies);
        }
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }
}
