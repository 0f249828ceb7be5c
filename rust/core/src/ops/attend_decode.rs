//! Params of `attend_decode`.

use super::element::Element;
use super::entries::KvView;
use super::error::{OpError, ensure_len, ensure_size};
use super::queries::Queries;
use super::scoring::Scoring;

/// Paged attention of one row per request: a decode step. Same result as `attend_prefill`.
#[derive(Debug)]
pub struct AttendDecode<'a, T, C = T> {
    /// One row per request, [B, H, D].
    pub queries: Queries<'a, T>,
    /// Keys and values of all requests.
    pub kv: KvView<'a, C>,
    /// Scale, rotation, window, soft cap.
    pub scoring: Scoring<'a>,
    /// [B+1]: entries of request b; with a reach [B·R+1], of request b and table r at b·R + r.
    pub entry_offsets: &'a [i32],
    /// [B, H, D], contiguous.
    pub out: &'a mut [T],
    /// [B, H], natural logarithm.
    pub lse: &'a mut [f32],
}

impl<T, C: Element> AttendDecode<'_, T, C> {
    /// Proves that every row, entry and offset is in range and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        self.kv.validate(self.entry_offsets)?;
        self.kv.scales.validate(C::QUANTISED)?;
        self.queries.validate(&self.kv.geometry)?;
        self.scoring.validate(&self.kv.geometry, self.kv.scales, self.kv.reach)?;
        let requests = (self.entry_offsets.len() - 1) / self.kv.tables();
        ensure_len("q rows", requests, self.queries.vectors.rows)?;
        let (rows, heads) = (self.queries.vectors.rows, self.queries.vectors.heads);
        ensure_size("out", &[rows, heads, self.kv.geometry.head_dim], self.out.len())?;
        ensure_size("lse", &[rows, heads], self.lse.len())
    }
}
