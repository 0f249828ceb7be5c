//! How a score is made from a query and a key.

use super::error::{OpError, OpErrorKind, ensure};
use super::geometry::PageGeometry;
use super::reach::Reach;
use super::rope::RopeTable;
use super::scales::KvScales;

/// How a score is made: `s = softcap(scale · qᵀ R(delta) k)`, kept where the key is visible.
///
/// A key is visible to a row when `key position ≤ row position` and, with a window w,
/// `key position > row position − w`; with a reach, each KV head has a window of its own, see
/// [`HeadReach`](super::HeadReach). Softcap c maps s to `c · tanh(s / c)`.
#[derive(Clone, Copy, Debug)]
pub struct Scoring<'a> {
    /// Factor on qᵀk, finite.
    pub scale: f32,
    /// Rotation of the model; read only where an entry has `delta ≠ 0`.
    pub rope: &'a RopeTable,
    /// Keys a row sees at most, itself included; at least 1. `None` where there is a reach.
    pub window: Option<u32>,
    /// Soft cap c > 0.
    pub softcap: Option<f32>,
}

impl Scoring<'_> {
    /// Checks the numbers against each other, and against what the cache is.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(
        &self,
        geometry: &PageGeometry,
        scales: KvScales,
        reach: Option<Reach<'_>>,
    ) -> Result<(), OpError> {
        self.rope.check_fits(geometry)?;
        let invalid = OpErrorKind::InvalidArgument;
        ensure(self.scale.is_finite(), invalid, "scale", || ("a finite number", self.scale))?;
        let whole = self.scale * scales.key;
        ensure(whole.is_finite(), invalid, "scale · key scale", || ("a finite number", whole))?;
        ensure(self.window != Some(0), invalid, "window", || ("at least 1", 0))?;
        let one = self.window.is_none() || reach.is_none();
        ensure(one, invalid, "window", || ("none beside a reach, whose heads have theirs", "one"))?;
        let cap = self.softcap.unwrap_or(1.0);
        ensure(cap.is_finite() && cap > 0.0, invalid, "softcap", || ("above 0 and finite", cap))
    }
}
