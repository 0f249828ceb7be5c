//! Params of `attend_prefill`.

use super::element::Element;
use super::entries::{KvView, check_offsets};
use super::error::{OpError, ensure_len, ensure_size};
use super::queries::Queries;
use super::scoring::Scoring;

/// Paged attention of rows at arbitrary positions, causal by position, for a batch of requests.
///
/// Row r of request b reads the entries of b that `scoring` or the reach lets it see, and gets
/// `out[r, h] = Σ softmax(s)·v` and `lse[r, h] = ln Σ exp(s)`. A row that sees no key gets
/// out 0 and lse −∞. Query head h reads KV head `h / (H / G)`. Rows are of `T`, the cache of `C`.
#[derive(Debug)]
pub struct AttendPrefill<'a, T, C = T> {
    /// Rows of all requests, [R, H, D].
    pub queries: Queries<'a, T>,
    /// Keys and values of all requests.
    pub kv: KvView<'a, C>,
    /// Scale, rotation, window, soft cap.
    pub scoring: Scoring<'a>,
    /// [B+1]: rows of request b are `row_offsets[b] .. row_offsets[b+1]`.
    pub row_offsets: &'a [i32],
    /// [B+1]: entries of request b; with a reach [B·R+1], of request b and table r at b·R + r.
    pub entry_offsets: &'a [i32],
    /// [R, H, D], contiguous.
    pub out: &'a mut [T],
    /// [R, H], natural logarithm.
    pub lse: &'a mut [f32],
}

impl<T, C: Element> AttendPrefill<'_, T, C> {
    /// Proves that every row, entry and offset is in range and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        self.kv.validate(self.entry_offsets)?;
        self.kv.scales.validate(C::QUANTISED)?;
        self.queries.validate(&self.kv.geometry)?;
        self.scoring.validate(&self.kv.geometry, self.kv.scales, self.kv.reach)?;
        check_offsets("row_offsets", self.row_offsets, self.queries.vectors.rows)?;
        let requests = (self.entry_offsets.len() - 1) / self.kv.tables();
        ensure_len("row_offsets", requests + 1, self.row_offsets.len())?;
        let (rows, heads) = (self.queries.vectors.rows, self.queries.vectors.heads);
        ensure_size("out", &[rows, heads, self.kv.geometry.head_dim], self.out.len())?;
        ensure_size("lse", &[rows, heads], self.lse.len())
    }
}
