//! Params of `pack_losses`.

use super::bases::{Bases, check_given};
use super::element::Element;
use super::error::{OpError, OpErrorKind, ensure, ensure_size};
use super::pack_pages::{Packs, refuse_quantised};

/// What packed pages lose of exact ones: Σ |x − x̂|² and Σ |x|² over the vectors of each page.
///
/// x̂ is what `UnpackPages` writes for x once `PackPages` has packed it, rounded to an element of
/// the cache. A vector that is NaN, or infinite, makes NaN of its page's sums.
#[derive(Debug)]
pub struct PackLosses<'a, C> {
    /// Exact pages, [pages, 2, P', D].
    pub cache: &'a [C],
    /// Which of them, N rows. Packed blocks count for nothing, `pages` are those of exact blocks,
    /// and `bases` none.
    pub packs: Packs<'a>,
    /// [K]: the pages of each block that are packed.
    pub ranks: &'a [i32],
    /// The basis of all blocks, [K, 2, rows, D], of a format that is packed in one.
    pub basis: Option<&'a [f32]>,
    /// [K, D, D]: errors of keys are multiplied by these first, as by roots of a metric.
    pub roots: Option<&'a [f64]>,
    /// So many tokens at the beginning of the first row are packed and count for nothing.
    pub left_out: usize,
    /// [N, K, bytes]: takes the packed pages, if anybody wants them.
    pub packed: Option<&'a mut [u8]>,
    /// [2, K, 2]: what is lost, then Σ |x|², of keys and of values.
    pub sums: &'a mut [f64],
}

/// Every block has the one basis.
const OF_ALL: &[i32] = &[0];

impl<'a, C> PackLosses<'a, C> {
    /// The basis as that of block 0.
    #[must_use]
    pub fn bases(&self) -> Option<Bases<'a>> {
        self.basis.map(|data| Bases { data, pages: self.ranks.len(), of: OF_ALL })
    }
}

impl<C: Element> PackLosses<'_, C> {
    /// Proves that every page is in range and all sizes belong together.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        refuse_quantised::<C>()?;
        let Packs { format, pages, rows, .. } = self.packs;
        self.packs.validate_sources(self.cache.len())?;
        for &rank in self.ranks {
            let known = usize::try_from(rank).is_ok_and(|rank| rank < pages);
            ensure(known, OpErrorKind::OutOfRange, "ranks", || {
                (format!("pages from 0 to below {pages}"), rank)
            })?;
        }
        let (count, dim) = (self.ranks.len(), format.head_dim());
        ensure(count > 0, OpErrorKind::InvalidArgument, "ranks", || ("a page at least", 0))?;
        if check_given(self.bases().as_ref(), &format, 1)?.is_some() {
            let sizes = [count, 2, format.basis_rows().unwrap_or(1), dim];
            ensure_size("basis", &sizes, self.basis.map_or(0, <[f32]>::len))?;
        }
        if let Some(roots) = self.roots {
            ensure_size("roots", &[count, dim, dim], roots.len())?;
        }
        if let Some(packed) = &self.packed {
            let rows = rows.len() / self.packs.width();
            ensure_size("packed pages", &[rows, count, format.page_bytes()], packed.len())?;
        }
        ensure_size("sums", &[2, count, 2], self.sums.len())
    }
}
