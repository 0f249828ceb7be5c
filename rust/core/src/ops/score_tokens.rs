//! Params of `score_tokens`.

use super::entries::{Entry, KvView};
use super::error::{OpError, ensure_len};
use super::queries::{Queries, Scoring};

/// Attention mass of every key of one request: `mass[p] = Σ_{rows, heads} softmax(s)[p]`.
///
/// The Sparse-Q score (SparseX, §3 and Algorithm 1), aggregated over the query heads. The rows'
/// score matrix is never stored. Positions that no entry covers get 0.
#[derive(Debug)]
pub struct ScoreTokens<'a, T> {
    /// The probing rows, [R, H, D].
    pub queries: Queries<'a, T>,
    /// Keys of the request; values are not read.
    pub kv: KvView<'a, T>,
    /// Scale, rotation, window, soft cap.
    pub scoring: Scoring<'a>,
    /// [end of the last entry], by position.
    pub mass: &'a mut [f32],
}

impl<T> ScoreTokens<'_, T> {
    /// Proves that every row and entry is in range and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let entries = i32::try_from(self.kv.entries.len()).unwrap_or(i32::MAX);
        self.kv.validate(&[0, entries])?;
        self.queries.validate(&self.kv)?;
        self.scoring.validate(&self.kv)?;
        let end = self.kv.entries.last().map_or(0, |&row| Entry::new(row).end_position());
        ensure_len("mass", end as usize, self.mass.len())
    }
}
