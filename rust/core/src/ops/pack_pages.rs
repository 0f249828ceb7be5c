//! Params of `pack_pages` and `unpack_pages`.

use super::bases::{Bases, check_given};
use super::element::Element;
use super::error::{OpError, OpErrorKind, ensure};
use super::geometry::PageGeometry;
use super::packed_format::PackedFormat;

/// Packs blocks of exact pages into blocks of packed ones, each with all of its pages.
///
/// A packed page of P tokens takes the tokens of P / P' pages of P' tokens: page r of a packed
/// block those of page r of its blocks of the cache, in their order. A block may have fewer tokens
/// than P: steps are those of the tokens that there are, and codes and steps of others are 0.
/// What is NaN or infinite makes NaN of what shares its steps: of a key's channel over the page, of
/// all values of a token; in a top-r page or one of planes, of its vector.
#[derive(Debug)]
pub struct PackPages<'a, C> {
    /// Exact pages, [pages, 2, P', D].
    pub cache: &'a [C],
    /// Packed ones, [pages, bytes].
    pub packed: &'a mut [u8],
    /// What is packed where.
    pub packs: Packs<'a>,
}

/// Writes what packed pages stand for into exact ones, rounded once: those tokens that a row
/// counts; other slots stay as they are.
///
/// Or their numbers `in_basis`: along each direction what a vector has of it, of planes in steps,
/// and 0 behind the last direction. All of a vector that is NaN is so.
#[derive(Debug)]
pub struct UnpackPages<'a, C> {
    /// Exact pages, [pages, 2, P', D].
    pub cache: &'a mut [C],
    /// Packed ones, [pages, bytes].
    pub packed: &'a [u8],
    /// What was packed where.
    pub packs: Packs<'a>,
    /// Whether it is numbers along the directions of a basis that are written.
    pub in_basis: bool,
}

/// Which blocks of a cache are, or become, which packed blocks.
#[derive(Clone, Copy, Debug)]
pub struct Packs<'a> {
    /// The packed pages.
    pub format: PackedFormat,
    /// P': tokens of an exact page, which divide P.
    pub page_tokens: usize,
    /// Pages of a block, on either side.
    pub pages: usize,
    /// The bases of top-r pages or planes.
    pub bases: Option<Bases<'a>>,
    /// Rows `[packed block, tokens, block …]` with P / P' blocks of the cache, of which those that
    /// have no token count for nothing. Never the null block, and no block is written twice.
    pub rows: &'a [i32],
}

/// One row: a packed block and the tokens in it.
#[derive(Clone, Copy, Debug)]
pub struct Pack<'a> {
    /// The packed block.
    pub block: usize,
    /// Tokens of it, at least one.
    pub tokens: usize,
    /// Blocks of the cache that have them.
    pub sources: &'a [i32],
}

impl Packs<'_> {
    /// Numbers of a row.
    #[must_use]
    pub fn width(&self) -> usize {
        2 + self.format.page_tokens() / self.page_tokens.max(1)
    }

    /// The rows, once `validate` accepted them.
    pub fn iter(&self) -> impl Iterator<Item = Pack<'_>> {
        self.rows.chunks_exact(self.width()).map(|row| {
            let tokens = row[1] as usize;
            let sources = &row[2..2 + tokens.div_ceil(self.page_tokens)];
            Pack { block: row[0] as usize, tokens, sources }
        })
    }

    /// Strides of the exact pages: those of one layer with as many heads as a block has pages.
    #[must_use]
    pub fn geometry(&self) -> PageGeometry {
        PageGeometry::arena(1, self.pages, self.page_tokens, self.format.head_dim())
    }

    /// Proves that all blocks lie in a cache of `cache_len` elements and in packed pages of
    /// `packed_len` bytes, and that none is written twice: of the packed ones, or when they are
    /// `unpacked` of the exact ones. Memory may be elsewhere, such as on a device.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(
        &self,
        cache_len: usize,
        packed_len: usize,
        unpacked: bool,
    ) -> Result<(), OpError> {
        let packed_pages = self.format.pages_in(packed_len)?;
        self.validate_sources(cache_len)?;
        let targets: Vec<i32> = self.rows.chunks_exact(self.width()).map(|row| row[0]).collect();
        if let Some(&last) = targets.iter().max() {
            let inside = (last as usize).checked_add(self.pages).is_some_and(|n| n <= packed_pages);
            ensure(inside, OpErrorKind::OutOfRange, "packed block", || {
                (format!("{} pages within {packed_pages}", self.pages), last)
            })?;
        }
        let exact = || self.iter().flat_map(|pack| pack.sources).copied().collect();
        self.check_apart(if unpacked { exact() } else { targets })
    }

    /// Proves of the rows and of a cache of `cache_len` elements what `validate` does, but for
    /// packed pages that there are not yet.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate_sources(&self, cache_len: usize) -> Result<(), OpError> {
        let geometry = self.geometry();
        geometry.check_counts()?;
        let tokens = self.format.page_tokens();
        ensure(tokens.is_multiple_of(self.page_tokens), OpErrorKind::Shape, "page_tokens", || {
            (format!("a divisor of {tokens}, the tokens of a packed page"), self.page_tokens)
        })?;
        let whole = self.rows.len().is_multiple_of(self.width());
        ensure(whole, OpErrorKind::Shape, "packs", || {
            (format!("rows of {} numbers", self.width()), self.rows.len())
        })?;
        let mut last = 0;
        for row in self.rows.chunks_exact(self.width()) {
            let sound = row[1] >= 1 && row[1] as usize <= tokens;
            ensure(sound, OpErrorKind::OutOfRange, "tokens of a packed block", || {
                (format!("1 to {tokens}"), row[1])
            })?;
            let sources = &row[2..2 + (row[1] as usize).div_ceil(self.page_tokens)];
            for &block in sources.iter().chain(&row[..1]) {
                ensure(block > 0, OpErrorKind::OutOfRange, "block", || {
                    ("at least 1, as block 0 is the null block", block)
                })?;
            }
            last = sources.iter().copied().fold(last, i32::max);
        }
        if last > 0 { geometry.check_inside(last as usize, 0, cache_len) } else { Ok(()) }
    }

    /// Proves that every packed block has the basis that its format needs. `validate` accepted the
    /// rows.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate_bases(&self, packed_len: usize) -> Result<(), OpError> {
        let packed_pages = packed_len / self.format.page_bytes();
        let Some(bases) = check_given(self.bases.as_ref(), &self.format, packed_pages)? else {
            return Ok(());
        };
        let last = self.pages - 1;
        self.iter().try_for_each(|pack| bases.check_block(&self.format, pack.block, last))
    }

    /// Refuses to look for numbers in a basis where pages have none.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn expect_basis(&self) -> Result<(), OpError> {
        let has = self.format.basis_rows().is_some();
        ensure(has, OpErrorKind::InvalidArgument, "in_basis", || {
            ("pages that are packed in a basis", self.format.kind().name())
        })
    }

    /// Refuses blocks that share a page.
    fn check_apart(&self, mut blocks: Vec<i32>) -> Result<(), OpError> {
        blocks.sort_unstable();
        let near = |pair: &&[i32]| ((pair[1] - pair[0]) as usize) < self.pages;
        let Some(pair) = blocks.windows(2).find(near) else { return Ok(()) };
        let expected = format!("blocks of {} pages that share none", self.pages);
        let got = format!("{} and {}", pair[0], pair[1]);
        Err(OpError::new(OpErrorKind::Overlap, "written blocks", expected, got))
    }
}

impl PackedFormat {
    /// Whole pages in so many bytes.
    ///
    /// # Errors
    /// `Shape` where there is a rest.
    pub fn pages_in(&self, bytes: usize) -> Result<usize, OpError> {
        let page = self.page_bytes();
        ensure(bytes.is_multiple_of(page), OpErrorKind::Shape, "packed pages", || {
            (format!("a multiple of {page} bytes"), bytes)
        })?;
        Ok(bytes / page)
    }
}

impl<C: Element> PackPages<'_, C> {
    /// Proves that every block is in range and none is written twice.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        refuse_quantised::<C>()?;
        self.packs.validate(self.cache.len(), self.packed.len(), false)?;
        self.packs.validate_bases(self.packed.len())
    }
}

impl<C: Element> UnpackPages<'_, C> {
    /// Proves that every block is in range and none is written twice.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        refuse_quantised::<C>()?;
        self.packs.validate(self.cache.len(), self.packed.len(), true)?;
        if self.in_basis {
            self.packs.expect_basis()?;
        }
        self.packs.validate_bases(self.packed.len())
    }
}

/// What is rounded already gains nothing by being rounded again.
pub(super) fn refuse_quantised<C: Element>() -> Result<(), OpError> {
    ensure(!C::QUANTISED, OpErrorKind::InvalidArgument, "cache", || {
        ("f32, bf16 or f16 pages", C::NAME)
    })
}
