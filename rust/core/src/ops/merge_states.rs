//! Params of `merge_states`.

use super::error::{OpError, OpErrorKind, ensure, ensure_len};

/// Combines S partial attentions of the same rows over disjoint keys into attention over the
/// union: weights `exp(lse_s − lse)` with `lse = ln Σ_s exp(lse_s)`.
///
/// A partial with lse −∞ saw no key and is skipped; where all are −∞, out is 0 and lse −∞.
#[derive(Debug)]
pub struct MergeStates<'a, T> {
    /// [S, R, H, D], contiguous.
    pub outs: &'a [T],
    /// [S, R, H], contiguous, natural logarithm.
    pub lses: &'a [f32],
    /// S.
    pub splits: usize,
    /// R·H: states of one split.
    pub states: usize,
    /// D.
    pub head_dim: usize,
    /// [R, H, D], contiguous.
    pub out: &'a mut [T],
    /// [R, H].
    pub lse: &'a mut [f32],
}

impl<T> MergeStates<'_, T> {
    /// Proves that the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        ensure(self.splits > 0, OpErrorKind::Shape, "splits", || ("at least 1", self.splits))?;
        ensure(self.head_dim > 0, OpErrorKind::Shape, "head_dim", || ("at least 1", 0))?;
        let product = |a: usize, b: usize| {
            a.checked_mul(b).ok_or_else(|| {
                OpError::new(OpErrorKind::Shape, "states", "a size that fits in memory", a)
            })
        };
        let elements = product(self.states, self.head_dim)?;
        ensure_len("outs", product(self.splits, elements)?, self.outs.len())?;
        ensure_len("lses", product(self.splits, self.states)?, self.lses.len())?;
        ensure_len("out", elements, self.out.len())?;
        ensure_len("lse", self.states, self.lse.len())
    }
}
