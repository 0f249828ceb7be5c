//! The bases of texts, which top-r pages and planes are packed in.

use super::entries::{Entry, KvView};
use super::error::{OpError, OpErrorKind, ensure, ensure_size};
use super::packed_format::PackedFormat;
use super::planes::{PlaneWidths, PlanesSide};
use super::scoring::Scoring;
use super::top_r::Side;

/// Bases, and which of them each packed block was packed in: that of its text.
///
/// A basis of top-r pages has, for each page of a block (a layer's KV head), a mean and C
/// directions for keys and for values. Directions are orthonormal and lie in the order in which
/// groups are made of them (`MosaicKV`, section 5.5). Keys are taken as they lie in a cache,
/// rotated by `RoPE`, so a basis can be folded into a query (section 5.3), and a text that is
/// shared at other positions keeps its own: the query is first turned back by the entry's
/// delta, then rotated into the basis.
///
/// One of planes has rows of its own in their place ([`PlanesBasis`]), which is used alike.
/// Without elements, as `T` of `()`, they are bases elsewhere, such as on a device.
#[derive(Clone, Copy, Debug)]
pub struct Bases<'a, T = f32> {
    /// [bases, pages, 2, rows, D]: the mean and what follows it, of keys and of values.
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

/// What planes are packed in: a mean, and what a step along each of D channels is.
#[derive(Clone, Copy, Debug)]
pub struct PlanesBasis<'a> {
    /// [D]
    pub mean: &'a [f32],
    /// [D, D]: what one step along a channel adds to a vector.
    pub steps: &'a [f32],
    /// [D, D]: the product with x − mean is how many steps x lies along a channel.
    pub measures: &'a [f32],
    /// Where codes lie.
    pub place: PlanesSide,
}

impl Bases<'_> {
    /// Checks that there is a whole number of bases of the format, and one number a packed page;
    /// of planes also that every page's codes have room.
    ///
    /// # Errors
    /// `Shape` naming what does not fit, `InvalidArgument` for bits that are no planes or too many.
    pub fn validate(&self, format: &PackedFormat, packed_pages: usize) -> Result<(), OpError> {
        let one = self.len_of_one(format);
        ensure(
            one > 0 && self.data.len().is_multiple_of(one),
            OpErrorKind::Shape,
            "bases",
            || (format!("a multiple of {one} numbers"), self.data.len()),
        )?;
        ensure_size("basis of each packed page", &[packed_pages], self.of.len())?;
        self.check_bits(format)
    }

    /// Checks that every page's codes have room, of planes.
    fn check_bits(&self, format: &PackedFormat) -> Result<(), OpError> {
        let Some(page) = format.planes() else { return Ok(()) };
        let one = self.len_of_one(format);
        for both in self.data.chunks_exact(one / self.pages) {
            let widths = widths_of(both, format.head_dim());
            let bytes = widths.map(|[keys, values]| keys.bytes() + values.bytes());
            let sound = bytes.is_some_and(|bytes| bytes <= page.token_bytes());
            ensure(sound, OpErrorKind::InvalidArgument, "bits of a basis", || {
                let most = page.token_bytes();
                let expected = format!("fours of channels of 8, 4, 2, 0 bits in {most} bytes");
                (expected, bytes.map_or_else(|| "others".to_owned(), |got| format!("{got} bytes")))
            })?;
        }
        Ok(())
    }
}

impl<T> Bases<'_, T> {
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
        let rows = format.basis_rows().unwrap_or(1);
        let half = rows.saturating_mul(format.head_dim());
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

    /// The same of planes.
    ///
    /// # Panics
    /// If there is no such page, or the format has no planes.
    #[must_use]
    pub fn planes(
        &self,
        format: &PackedFormat,
        block: usize,
        rank: usize,
        side: Side,
    ) -> PlanesBasis<'a> {
        let dim = format.head_dim();
        let both = self.len_of_one(format) / self.pages;
        let page = self.of[block] as usize * self.pages + rank;
        let both = &self.data[page * both..][..both];
        let widths = widths_of(both, dim).expect("planes, as `validate` proved");
        let (keys, values) = both.split_at(both.len() / 2);
        let (mean, rest) = if side == Side::Keys { keys } else { values }.split_at(dim);
        let (steps, measures) = rest[dim..].split_at(dim * dim);
        let place = format.planes().expect("pages of planes").side(widths, side);
        PlanesBasis { mean, steps, measures, place }
    }
}

/// How many channels of keys and of values have 8, 4 and 2 bits in a page's two sides of a basis,
/// which say so in the row behind the mean.
fn widths_of(both: &[f32], dim: usize) -> Option<[PlaneWidths; 2]> {
    let (keys, values) = both.split_at(both.len() / 2);
    let of = |side: &[f32]| PlaneWidths::of(&side[dim..2 * dim]);
    Some([of(keys)?, of(values)?])
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
        let needed = self.basis_rows().is_some();
        ensure(given == needed, OpErrorKind::InvalidArgument, "bases", || {
            let words = |there: bool| if there { "some" } else { "none" };
            (format!("{} for {self}", words(needed)), words(given))
        })
    }
}
