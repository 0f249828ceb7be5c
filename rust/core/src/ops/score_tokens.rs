//! Params of `score_tokens`.

use super::element::Element;
use super::entries::{Entry, KvView};
use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_size};
use super::queries::Queries;
use super::reach::Visible;
use super::scoring::Scoring;

/// Attention mass of every key of one request: `mass[p] = Σ_{rows, heads} softmax(s)[p]`.
///
/// The Sparse-Q score (SparseX, §3 and Algorithm 1), aggregated over the query heads. The rows'
/// score matrix is never stored. Positions that no entry covers get 0.
///
/// What RedKnot's sparse FFN ranks its rows by (§4.2; Algorithm 1, SelectImportantTokens) needs no
/// output of its own: the size of a row's attention output is `attend_prefill`'s `out`, and the
/// mass that a row's token received is `mass` at the row's position.
#[derive(Debug)]
pub struct ScoreTokens<'a, T, C = T> {
    /// The probing rows, [R, H, D].
    pub queries: Queries<'a, T>,
    /// Keys of the request; values are not read.
    pub kv: KvView<'a, C>,
    /// Scale, rotation, window, soft cap.
    pub scoring: Scoring<'a>,
    /// [2]: all entries; with a reach [tables+1], those of each table.
    pub entry_offsets: &'a [i32],
    /// [largest end of an entry], by position.
    pub mass: &'a mut [f32],
    /// Mass far from the row, where it is wanted.
    pub edge: Option<EdgeMass<'a>>,
}

/// Share of a row's softmax mass on keys outside the first `sink` and the latest `window`: what a
/// local head would not see. A local head with much of it is promoted (RedKnot, §1 and §3.2).
///
/// Kept per row and query head: the mean over rows is a head's figure, the largest of a KV head's
/// query heads decides for it, and the mean over heads tells rows with far context from others.
#[derive(Debug)]
pub struct EdgeMass<'a> {
    /// Latest keys that are not edge, the row itself included; at least 1.
    pub window: u32,
    /// Keys at the start of the sequence that are not edge.
    pub sink: u32,
    /// [R, H], each from 0 to 1; 0 for a row that sees no key.
    pub share: &'a mut [f32],
}

impl EdgeMass<'_> {
    /// Positions that are not edge to a row at `position`.
    #[must_use]
    pub fn near(&self, position: i32) -> Visible {
        Visible::new(position, Some(self.window), self.sink)
    }
}

impl<T, C: Element> ScoreTokens<'_, T, C> {
    /// Proves that every row and entry is in range and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        self.kv.validate(self.entry_offsets)?;
        ensure_len("entry_offsets", self.kv.tables().saturating_add(1), self.entry_offsets.len())?;
        self.kv.scales.validate(C::QUANTISED)?;
        self.queries.validate(&self.kv.geometry)?;
        self.scoring.validate(&self.kv.geometry, self.kv.scales, self.kv.reach)?;
        ensure_len("mass", self.end() as usize, self.mass.len())?;
        let Some(edge) = &self.edge else { return Ok(()) };
        ensure(edge.window > 0, OpErrorKind::InvalidArgument, "window of edge", || {
            ("at least 1", edge.window)
        })?;
        let (rows, heads) = (self.queries.vectors.rows, self.queries.vectors.heads);
        ensure_size("edge", &[rows, heads], edge.share.len())
    }

    /// One past the last position of any table.
    fn end(&self) -> i64 {
        let last = |span: &[i32]| self.kv.entries[span[0] as usize..span[1] as usize].last();
        let ends = self.entry_offsets.windows(2).filter_map(last);
        ends.map(|&row| Entry::new(row).end_position()).max().unwrap_or(0)
    }
}
