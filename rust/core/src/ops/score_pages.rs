//! Params of `score_pages`.

use super::entries::KvView;
use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_size};
use super::page_bounds::PageBounds;
use super::queries::Queries;
use super::scoring::Scoring;

/// What a page's score is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageScore {
    /// No key of the page scores higher: `Σ_d max(q_d · min_d, q_d · max_d)` (Quest; FlexiCache,
    /// section 3.2).
    MinMax,
    /// What the page's mean key scores (MosaicKV, section 5.1).
    Mean,
}

/// How the scores of the query heads that share a KV head become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedScore {
    /// The highest: a page that one of the heads needs is read.
    Highest,
    /// Their sum.
    Sum,
}

/// How much one row of each of B requests may find in each page that its tables list, a score for
/// each KV head.
///
/// A score is that of a logit, `softcap(scale · qᵀ R(delta) x)` of the bounds x of an entry's page.
/// These are of the keys as they are stored, so an entry with `delta ≠ 0` is scored by the query
/// turned the other way. The bounds of an entry that lists a part of a page are those of the whole
/// of it. Windows do not matter: what is listed is scored. NaN in a bound, or in a query,
/// makes the score NaN.
#[derive(Debug)]
pub struct ScorePages<'a, T> {
    /// One row a request, [B, H, D].
    pub queries: Queries<'a, T>,
    /// Whose tables and pages; of the cache only the length is looked at.
    pub kv: KvView<'a, ()>,
    /// Scale, rotation, soft cap; its window does not matter.
    pub scoring: Scoring<'a>,
    /// [B+1]: entries of request b; with a reach [B·R+1], of request b and table r at b·R + r.
    pub entry_offsets: &'a [i32],
    /// [pages, 3, D]: min, max and mean of each page's keys, see [`PageBounds`].
    pub bounds: &'a [f32],
    /// What a score is made of.
    pub score: PageScore,
    /// How query heads share it.
    pub shared: SharedScore,
    /// [B, G, S]: the score of entry i of the head's table at i. What lies behind stays.
    pub scores: &'a mut [f32],
    /// S: at least the entries of any table.
    pub width: usize,
    /// [B, G]: the entries of each.
    pub counts: &'a mut [i32],
}

impl<T> ScorePages<'_, T> {
    /// Proves that every row, entry and page is in range and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let Self { queries, kv, scoring, entry_offsets, scores, width, counts, .. } = self;
        let sizes = (self.bounds.len(), *width);
        validate_scored(queries, kv, scoring, entry_offsets, sizes)?;
        let (requests, heads) = ((entry_offsets.len() - 1) / kv.tables(), kv.geometry.kv_heads);
        ensure_len("q rows", requests, queries.vectors.rows)?;
        ensure_size("scores", &[requests, heads, *width], scores.len())?;
        ensure_size("counts", &[requests, heads], counts.len())
    }
}

/// Proves that rows, and the entries and pages of each request, are in range of bounds of
/// `bounds_len` elements and of `width` scores a table. Bounds and scores may be elsewhere, such as
/// on a device; so may tables, of which then none is given.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_scored<T>(
    queries: &Queries<'_, T>,
    kv: &KvView<'_, ()>,
    scoring: &Scoring<'_>,
    entry_offsets: &[i32],
    (bounds_len, width): (usize, usize),
) -> Result<(), OpError> {
    kv.validate(entry_offsets)?;
    queries.validate(&kv.geometry)?;
    scoring.validate(&kv.geometry, kv.scales, kv.reach)?;
    let row = PageBounds::row_len(kv.geometry.head_dim);
    ensure(bounds_len.is_multiple_of(row), OpErrorKind::Shape, "bounds", || {
        (format!("a multiple of {row} elements"), bounds_len)
    })?;
    let pages = bounds_len / row;
    for head in 0..kv.geometry.kv_heads {
        let reach = kv.head(head, scoring);
        for request in 0..(entry_offsets.len() - 1) / kv.tables() {
            let entries = &kv.entries[kv.span(entry_offsets, request, reach.table)];
            ensure(entries.len() <= width, OpErrorKind::Shape, "width of scores", || {
                (format!("at least {} (entries of request {request})", entries.len()), width)
            })?;
            let last = entries.iter().map(|entry| entry[0] as usize).max();
            let needed = last.map_or(0, |block| block.saturating_add(reach.rank + 1));
            ensure(needed <= pages, OpErrorKind::OutOfRange, "bounds", || {
                (format!("those of at least {needed} pages"), pages)
            })?;
        }
    }
    Ok(())
}
