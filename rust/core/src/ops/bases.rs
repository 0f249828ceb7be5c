//! The rotated bases of texts, which top-r pages are packed in.

use super::entries::{Entry, KvView};
use super::error::{OpError, OpErrorKind, ensure, ensure_size};
use super::packed_format::PackedFormat;
use super::scoring::Scoring;
use super::top_r::Side;

/// Rotated bases, and which of them each packed block was packed in: that of its text.
///
/// A basis has, for each page of a block (a layer's KV head), a mean and C directions for keys and
/// for values. Directions are orthonormal and lie in the order in which groups are made of them
/// (`MosaicKV`, section 5.5). Keys are taken as they lie in a cache, rotated by `RoPE`, so a basis
/// can be folded into a query (section 5.3), and a text that is shared at other positions keeps its
/// own: the query is first turned back by the entry's delta, then rotated into the basis.
///
/// Without elements, as `T` of `()`, they are bases elsewhere, such as on a device.
#[derive(Clone, Copy, Debug)]
pub struct Bases<'a, T = f32> {
    /// [bases, pages, 2, C + 1, D]: the mean, then the directions, of keys and of values.
    pub data: &'a [T],
    /// Pages of a block.
    pub pages: usize,
    /// [packed pages]: the basis of the block that begins at a page.
    pub of: &'a [i32],
}

/// A mean and C directions.
#[derive(Clone, Copy, Debug)]
pub struct Basis<'a> {
    /// [D]
    pub mean: &'a [f32],
    /// [C, D]
    pub directions: &'a [f32],
}

impl<T> Bases<'_, T> {
    /// Checks that there is a whole number of bases of the format, and one number a packed page.
    ///
    /// # Errors
    /// `Shape` naming what does not fit.
    pub fn validate(&self, format: &PackedFormat, packed_pages: usize) -> Result<(), OpError> {
        let one = self.len_of_one(format);
        ensure(
            one > 0 && self.data.len().is_multiple_of(one),
            OpErrorKind::Shape,
            "bases",
            || (format!("a multiple of {one} numbers"), self.data.len()),
        )?;
        ensure_size("basis of each packed page", &[packed_pages], self.of.len())
    }

    /// Checks the basis of a block with pages up to `last_rank`.
    ///
    /// # Errors
    /// `OutOfRange` where there is no such basis, or it has no such page.
    pub fn check_block(
        &self,
        format: &PackedFormat,
        block: usize,
        last_rank: usize,
    ) -> Result<(), OpError> {
        let count = self.data.len() / self.len_of_one(format).max(1);
        let number = self.of[block];
        let known = usize::try_from(number).is_ok_and(|number| number < count);
        ensure(known, OpErrorKind::OutOfRange, "basis of a packed block", || {
            (format!("a basis from 0 to below {count}"), number)
        })?;
        ensure(last_rank < self.pages, OpErrorKind::OutOfRange, "pages of a basis", || {
            (format!("more than {last_rank}"), self.pages)
        })
    }

    /// Checks the basis of every block that a head reads. `validate()` of the op accepted the
    /// entries.
    ///
    /// # Errors
    /// As `check_block`.
    pub fn check_entries(
        &self,
        format: &PackedFormat,
        kv: &KvView<'_, ()>,
        scoring: &Scoring<'_>,
        entry_offsets: &[i32],
    ) -> Result<(), OpError> {
        let requests = (entry_offsets.len() - 1) / kv.tables();
        for head in (0..kv.geometry.kv_heads).map(|head| kv.head(head, scoring)) {
            for request in 0..requests {
                for &row in &kv.entries[kv.span(entry_offsets, request, head.table)] {
                    self.check_block(format, Entry::new(row).block, head.rank)?;
                }
            }
        }
        Ok(())
    }

    fn len_of_one(&self, format: &PackedFormat) -> usize {
        let channels = format.top_r().map_or(0, |page| page.of().channels);
        let half = (channels + 1).saturating_mul(format.head_dim());
        self.pages.saturating_mul(2).saturating_mul(half)
    }
}

impl<'a> Bases<'a> {
    /// The basis of one page of a block. Valid for blocks that `validate()` of the op accepted.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn basis(&self, format: &PackedFormat, block: usize, rank: usize, side: Side) -> Basis<'a> {
        let half = self.len_of_one(format) / (2 * self.pages);
        let page = self.of[block] as usize * self.pages + rank;
        let number = 2 * page + usize::from(side == Side::Values);
        let (mean, directions) =
            self.data[number * half..(number + 1) * half].split_at(format.head_dim());
        Basis { mean, directions }
    }
}

/// Checks that a format has the bases that it needs, and no others.
///
/// # Errors
/// `InvalidArgument` naming `bases`.
pub(super) fn check_given<'b, 'a>(
    bases: Option<&'b Bases<'a>>,
    format: &PackedFormat,
    packed_pages: usize,
) -> Result<Option<&'b Bases<'a>>, OpError> {
    format.expect_bases(bases.is_some())?;
    if let Some(bases) = bases {
        bases.validate(format, packed_pages)?;
    }
    Ok(bases)
}

impl PackedFormat {
    /// Refuses bases of pages that have none, and pages without those that they need.
    ///
    /// # Errors
    /// `InvalidArgument` naming `bases`.
    pub fn expect_bases(&self, given: bool) -> Result<(), OpError> {
        let needed = self.top_r().is_some();
        ensure(given == needed, OpErrorKind::InvalidArgument, "bases", || {
            let words = |there: bool| if there { "some" } else { "none" };
            (format!("{} for {self}", words(needed)), words(given))
        })
    }
}
