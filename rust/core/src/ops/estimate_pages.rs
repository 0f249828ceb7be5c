//! Params of `estimate_pages`.

use super::entries::{KvView, check_offsets};
use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_size};
use super::queries::Queries;
use super::reach::{HeadReach, Reach};
use super::scoring::Scoring;

/// Entry tables of which only the positions count: of each KV head the entries that it has read.
#[derive(Clone, Copy, Debug)]
pub struct ReadEntries<'a> {
    /// Rows `[block, begin, end, position, delta]`.
    pub entries: &'a [[i32; 5]],
    /// [B+1]: entries of request b; with a reach [B·R+1], of request b and table r at b·R + r.
    pub offsets: &'a [i32],
    /// Which table each head reads; pages and windows do not matter.
    pub reach: Option<Reach<'a>>,
}

impl<'a> ReadEntries<'a> {
    /// R: entry tables of a request.
    #[must_use]
    pub fn tables(&self) -> usize {
        self.reach.map_or(1, |reach| reach.tables)
    }

    /// What a KV head has read of a request. Valid for heads that `validate()` accepted.
    ///
    /// # Panics
    /// If there is no such request or head.
    #[must_use]
    pub fn of(&self, request: usize, head: usize) -> &'a [[i32; 5]] {
        let table = self.reach.map_or(0, |reach| HeadReach::new(reach.heads[head]).table);
        let at = request * self.tables() + table;
        &self.entries[self.offsets[at] as usize..self.offsets[at + 1] as usize]
    }

    /// Proves that every head of every request has a table within the entries.
    fn validate(&self, requests: usize, heads: usize) -> Result<(), OpError> {
        let ends = requests.checked_mul(self.tables()).and_then(|ends| ends.checked_add(1));
        ensure_len("read_offsets", ends.unwrap_or(usize::MAX), self.offsets.len())?;
        let Some(reach) = self.reach else {
            return check_offsets("read_offsets", self.offsets, self.entries.len());
        };
        reach.validate(heads)?;
        for request in 0..requests {
            for head in reach.heads {
                let at = request * reach.tables + HeadReach::new(*head).table;
                let ends = (self.offsets[at], self.offsets[at + 1]);
                let span = usize::try_from(ends.0).ok().zip(usize::try_from(ends.1).ok());
                let inside = span.and_then(|(from, to)| self.entries.get(from..to)).is_some();
                ensure(inside, OpErrorKind::Shape, "read_offsets", || {
                    let expected = format!("offsets that rise, up to {}", self.entries.len());
                    (expected, format!("{ends:?}"))
                })?;
            }
        }
        Ok(())
    }
}

/// Attention of one row per request over some pages, and an estimate of the pages it left out: of
/// each its mean key and mean value stand for all of its tokens (after RetroInfer, where clusters
/// of tokens have what pages have here).
///
/// The result is the softmax over what was attended to, as one term of logit `lse` and value
/// `attended`, and one term for each entry that a head's table lists and that it has not read: of
/// logit `softcap(scale · qᵀ R(delta) k) + ln(tokens)`, k the mean key, and of the mean value. An
/// entry has been read when the head has read one at its position. Means are of the keys as they
/// are stored, so an entry with `delta ≠ 0` is met by the query turned the other way. Windows do
/// not matter.
///
/// An entry whose mean key has an element that is not finite has no term, as if nothing were
/// estimated of it; its mean value is not looked at. Without a term, as where a head has read all
/// that its table lists, attention stays as it is, bit for bit.
#[derive(Debug)]
pub struct EstimatePages<'a, T> {
    /// One row a request, [B, H, D].
    pub queries: Queries<'a, T>,
    /// [B, H, D], contiguous: attention over what was read.
    pub attended: &'a [T],
    /// [B, H]: its log-sum-exp, −∞ where no key was seen.
    pub attended_lse: &'a [f32],
    /// Whose tables and pages; of the cache only the length is looked at.
    pub kv: KvView<'a, ()>,
    /// Scale, rotation, soft cap; its window does not matter.
    pub scoring: Scoring<'a>,
    /// [B+1]: entries of request b; with a reach [B·R+1], of request b and table r at b·R + r.
    pub entry_offsets: &'a [i32],
    /// What each head has read.
    pub read: ReadEntries<'a>,
    /// [pages, 2, D]: mean key and mean value of each page's tokens.
    pub means: &'a [f32],
    /// [B, H, D], contiguous.
    pub out: &'a mut [T],
    /// [B, H].
    pub lse: &'a mut [f32],
}

impl<T> EstimatePages<'_, T> {
    /// Proves that every row, entry and page is in range and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let Self { queries, kv, scoring, entry_offsets, read, .. } = self;
        validate_estimated(queries, kv, scoring, entry_offsets, read)?;
        let (requests, heads) = ((entry_offsets.len() - 1) / kv.tables(), queries.vectors.heads);
        ensure_len("q rows", requests, queries.vectors.rows)?;
        let (rows, states) = ([requests, heads, kv.geometry.head_dim], [requests, heads]);
        ensure_size("attended", &rows, self.attended.len())?;
        ensure_size("lse of attended", &states, self.attended_lse.len())?;
        ensure_size("out", &rows, self.out.len())?;
        ensure_size("lse", &states, self.lse.len())?;
        let row = 2 * kv.geometry.head_dim;
        let pages = kv.cache.len() / kv.geometry.block_stride.max(1);
        ensure_size("means", &[pages, row], self.means.len())
    }
}

/// Proves that rows, entries and what was read are in range. Means, results and the cache may be
/// elsewhere, such as on a device; so may tables, of which then none is given.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_estimated<T>(
    queries: &Queries<'_, T>,
    kv: &KvView<'_, ()>,
    scoring: &Scoring<'_>,
    entry_offsets: &[i32],
    read: &ReadEntries<'_>,
) -> Result<(), OpError> {
    kv.validate(entry_offsets)?;
    queries.validate(&kv.geometry)?;
    scoring.validate(&kv.geometry, kv.scales, kv.reach)?;
    read.validate((entry_offsets.len() - 1) / kv.tables(), kv.geometry.kv_heads)
}
