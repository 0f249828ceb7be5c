//! Where the key and value of a token lie.

use super::error::{OpError, OpErrorKind, ensure};

/// Element strides of a paged KV tensor.
///
/// The key vector of (block, layer, head, slot) starts at element
/// `block·block_stride + layer·layer_stride + head·head_stride + slot·token_stride` and its D
/// elements are contiguous; the value vector starts `value_offset` further on.
///
/// Fields are public so that a binding can describe an engine's tensor; nothing is trusted before
/// `validate()` of the op that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageGeometry {
    /// L: layers the tensor holds (1 for an engine's per-layer tensor).
    pub layers: usize,
    /// G: KV heads of a layer.
    pub kv_heads: usize,
    /// P: tokens of a page.
    pub page_tokens: usize,
    /// D: elements of one key or value vector.
    pub head_dim: usize,
    /// Elements from block number b to b + 1.
    pub block_stride: usize,
    /// Elements from one layer to the next.
    pub layer_stride: usize,
    /// Elements from one KV head to the next.
    pub head_stride: usize,
    /// Elements from one slot to the next.
    pub token_stride: usize,
    /// Elements from a token's key to its value.
    pub value_offset: usize,
}

impl PageGeometry {
    /// Our arena `[pages, 2, P, D]`: a block number is the number of its first page, and the page
    /// of (layer, head) is `layer·G + head` pages further on.
    #[must_use]
    pub fn arena(layers: usize, kv_heads: usize, page_tokens: usize, head_dim: usize) -> Self {
        let half_page = page_tokens * head_dim;
        Self {
            layers,
            kv_heads,
            page_tokens,
            head_dim,
            block_stride: 2 * half_page,
            // More heads than any tensor has are refused where the op's arguments are looked at.
            layer_stride: kv_heads.saturating_mul(2 * half_page),
            head_stride: 2 * half_page,
            token_stride: head_dim,
            value_offset: half_page,
        }
    }

    /// First element of a key vector. Valid for indices that an op's `validate()` accepted.
    #[must_use]
    pub fn key_offset(&self, block: usize, layer: usize, head: usize, slot: usize) -> usize {
        block * self.block_stride
            + layer * self.layer_stride
            + head * self.head_stride
            + slot * self.token_stride
    }

    /// First element of a value vector. Valid for indices that an op's `validate()` accepted.
    #[must_use]
    pub fn value_offset(&self, block: usize, layer: usize, head: usize, slot: usize) -> usize {
        self.key_offset(block, layer, head, slot) + self.value_offset
    }

    /// Checks the counts: all positive, D a multiple of 8.
    pub(crate) fn check_counts(&self) -> Result<(), OpError> {
        let counts = [self.layers, self.kv_heads, self.page_tokens, self.head_dim];
        ensure(counts.iter().all(|&n| n > 0), OpErrorKind::Shape, "geometry", || {
            ("layers, kv_heads, page_tokens, head_dim ≥ 1", format!("{counts:?}"))
        })?;
        ensure(self.head_dim.is_multiple_of(8), OpErrorKind::Shape, "head_dim", || {
            ("a multiple of 8", self.head_dim)
        })?;
        ensure(self.page_tokens <= i32::MAX as usize, OpErrorKind::Shape, "page_tokens", || {
            ("at most 2^31 − 1", self.page_tokens)
        })
    }

    /// Checks that every (layer ≤ `last_layer`, head, slot) of block `last_block` lies in a cache
    /// of `len` elements; smaller blocks then do as well.
    pub(crate) fn check_inside(
        &self,
        last_block: usize,
        last_layer: usize,
        len: usize,
    ) -> Result<(), OpError> {
        self.check_inside_of("the cache", last_block, last_layer, len)
    }

    /// The same of another tensor, called `tensor`.
    pub(crate) fn check_inside_of(
        &self,
        tensor: &str,
        last_block: usize,
        last_layer: usize,
        len: usize,
    ) -> Result<(), OpError> {
        let end = self.end_of(last_block, last_layer, self.kv_heads - 1);
        ensure(end.is_some_and(|end| end <= len), OpErrorKind::OutOfRange, "block", || {
            (format!("a block within {tensor} of {len} elements"), last_block)
        })
    }

    /// Checks that every slot of page `last_rank` of block `last_block` lies in a tensor of `len`
    /// elements; smaller ranks and blocks then do as well.
    pub(crate) fn check_page(
        &self,
        last_block: usize,
        last_rank: usize,
        len: usize,
    ) -> Result<(), OpError> {
        let end = self.end_of(last_block, 0, last_rank);
        ensure(end.is_some_and(|end| end <= len), OpErrorKind::OutOfRange, "rank of a head", || {
            let got = format!("rank {last_rank} of block {last_block}");
            (format!("a page within the cache of {len} elements"), got)
        })
    }

    /// Elements from a page's first key to one past its last value.
    pub(crate) fn page_extent(&self) -> Result<usize, OpError> {
        let axes = [(self.page_tokens, self.token_stride), (2, self.value_offset)];
        disjoint_extent(&axes, self.head_dim).ok_or_else(|| self.overlap())
    }

    fn overlap(&self) -> OpError {
        let (expected, got) = ("strides that keep tokens apart", format!("{self:?}"));
        OpError::new(OpErrorKind::Overlap, "geometry", expected, got)
    }

    /// Checks that distinct (layer, head, slot) never share an element, and neither do distinct
    /// blocks of `blocks` (sorted, unique). Block 0, the null block, is counted in.
    pub(crate) fn check_disjoint(&self, blocks: &[i32]) -> Result<(), OpError> {
        let axes = [
            (self.layers, self.layer_stride),
            (self.kv_heads, self.head_stride),
            (self.page_tokens, self.token_stride),
            (2, self.value_offset),
        ];
        let extent = disjoint_extent(&axes, self.head_dim).ok_or_else(|| self.overlap())?;
        let Some(&last) = blocks.last() else { return Ok(()) };
        let numbers = usize::try_from(last).unwrap_or(0).saturating_add(1);
        let [a, b, c, d] = axes;
        let with_blocks = [a, b, c, d, (numbers, self.block_stride)];
        if disjoint_extent(&with_blocks, self.head_dim).is_some() {
            return Ok(());
        }
        let mut previous = 0;
        for &block in blocks.iter().filter(|&&block| block != 0) {
            let apart = (block - previous) as usize;
            let far = apart.checked_mul(self.block_stride).is_none_or(|gap| gap >= extent);
            ensure(far, OpErrorKind::Overlap, "block", || {
                (format!("blocks whose pages do not overlap block {previous}"), block)
            })?;
            previous = block;
        }
        Ok(())
    }

    /// One past the last element of (block, layer, head), or `None` when that overflows.
    fn end_of(&self, block: usize, layer: usize, head: usize) -> Option<usize> {
        let axes = [
            (block, self.block_stride),
            (layer, self.layer_stride),
            (head, self.head_stride),
            (self.page_tokens - 1, self.token_stride),
            (1, self.value_offset),
        ];
        let last = axes.iter().try_fold(0usize, |sum, &(index, stride)| {
            sum.checked_add(index.checked_mul(stride)?)
        })?;
        last.checked_add(self.head_dim)
    }
}

/// Elements spanned by a strided box of vectors, or `None` when two of them may share an element:
/// with axes sorted by stride, each must step over all that the smaller ones span.
pub(super) fn disjoint_extent(axes: &[(usize, usize)], vector: usize) -> Option<usize> {
    let mut sorted = [(0, 0); 5];
    let axes = {
        let used = &mut sorted[..axes.len()];
        used.copy_from_slice(axes);
        used.sort_unstable_by_key(|&(_, stride)| stride);
        used
    };
    axes.iter().filter(|&&(count, _)| count > 1).try_fold(vector, |extent, &(count, stride)| {
        if stride < extent {
            return None;
        }
        (count - 1).checked_mul(stride)?.checked_add(extent)
    })
}
