//! Params of `score_pages`.

use super::entries::KvView;
use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_rows, ensure_size};
use super::fp8::Fp8E4m3;
use super::fp8_bounds::{Fp8Bounds, fp8_vectors};
use super::page_bounds::PageBounds;
use super::page_score::PageScore;
use super::queries::Queries;
use super::scoring::Scoring;

/// How the scores of the query heads that share a KV head become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedScore {
    /// The highest: a page that one of the heads needs is read.
    Highest,
    /// Their sum.
    Sum,
}

/// What bounds are read from, contiguous.
#[derive(Clone, Copy, Debug)]
pub enum Bounds<'a> {
    /// [pages, 3, D]: min, max, mean.
    F32(&'a [f32]),
    /// Those that one score is made of.
    Fp8(Fp8Bounds<&'a [Fp8E4m3], &'a [u8]>),
}

impl Bounds<'_> {
    /// How many pages have bounds in them.
    ///
    /// # Errors
    /// When the length is none of whole pages, or they are made for another score.
    pub fn pages(&self, head_dim: usize, score: PageScore) -> Result<usize, OpError> {
        match self {
            Self::F32(values) => ensure_rows("bounds", PageBounds::row_len(head_dim), values.len()),
            Self::Fp8(bounds) => bounds.expect(score).and_then(|()| bounds.pages(head_dim)),
        }
    }

    /// A page's bounds in f32: of min–max scores the least and the greatest [2, D], else the mean
    /// [D]. Those that are not of f32 are widened into `room`.
    #[must_use]
    pub fn of_page<'b>(
        &'b self,
        page: usize,
        (head_dim, score): (usize, PageScore),
        room: &'b mut Vec<f32>,
    ) -> &'b [f32] {
        match self {
            Self::F32(values) => {
                let row = PageBounds::row_len(head_dim);
                let of_page = &values[page * row..][..row];
                let means = 2 * head_dim;
                if score == PageScore::Mean { &of_page[means..] } else { &of_page[..means] }
            }
            Self::Fp8(bounds) => {
                room.resize(fp8_vectors(score) * head_dim, 0.0);
                bounds.widen(page, room);
                room
            }
        }
    }
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
    /// Bounds of each page's keys, see [`PageBounds`].
    pub bounds: Bounds<'a>,
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
        let sizes = (self.bounds.pages(kv.geometry.head_dim, self.score)?, *width);
        validate_scored(queries, kv, scoring, entry_offsets, sizes)?;
        let (requests, heads) = ((entry_offsets.len() - 1) / kv.tables(), kv.geometry.kv_heads);
        ensure_len("q rows", requests, queries.vectors.rows)?;
        ensure_size("scores", &[requests, heads, *width], scores.len())?;
        ensure_size("counts", &[requests, heads], counts.len())
    }
}

/// Proves that rows, and the entries and pages of each request, are in range of bounds of so many
/// `pages` and of `width` scores a table. Bounds and scores may be elsewhere, such as
/// on a device; so may tables, of which then none is given.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_scored<T>(
    queries: &Queries<'_, T>,
    kv: &KvView<'_, ()>,
    scoring: &Scoring<'_>,
    entry_offsets: &[i32],
    (pages, width): (usize, usize),
) -> Result<(), OpError> {
    kv.validate(entry_offsets)?;
    queries.validate(&kv.geometry)?;
    scoring.validate(&kv.geometry, kv.scales, kv.reach)?;
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
