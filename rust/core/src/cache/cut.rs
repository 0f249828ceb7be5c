//! What copies of a request's tables must know of tokens that were taken back.

/// The last time, or times in a row, that tokens were taken back.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// The request's revision before and behind it.
    before: u64,
    behind: u64,
    /// The fewest tokens that were left.
    pub(super) len: usize,
}

impl Cut {
    /// A cut to `len` tokens at a revision, where `last` was the one before it.
    pub(super) fn after(last: Option<Cut>, revision: u64, len: usize) -> Cut {
        let fresh = Cut { before: revision, behind: revision + 1, len };
        match last.filter(|last| last.behind == revision) {
            Some(last) => Cut { before: last.before, len: last.len.min(len), ..fresh },
            None => fresh,
        }
    }

    /// Whether nothing else has changed between two revisions.
    pub(super) fn spans(&self, before: u64, behind: u64) -> bool {
        (self.before, self.behind) == (before, behind)
    }
}
