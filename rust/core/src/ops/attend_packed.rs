//! Params of `attend_packed`.

use super::bases::{Bases, check_given};
use super::entries::KvView;
use super::error::{OpError, ensure_len, ensure_size};
use super::geometry::PageGeometry;
use super::packed_format::PackedFormat;
use super::queries::Queries;
use super::reach::Reach;
use super::scales::KvScales;
use super::scoring::Scoring;

/// Packed keys and values that a call may read, of one layer: a [`KvView`] of packed pages.
#[derive(Clone, Copy, Debug)]
pub struct PackedKv<'a> {
    /// All packed pages, [pages, bytes].
    pub packed: &'a [u8],
    /// What a page is.
    pub format: PackedFormat,
    /// L: layers of a block.
    pub layers: usize,
    /// G: KV heads of a layer.
    pub kv_heads: usize,
    /// The layer read.
    pub layer: usize,
    /// Rows `[block, begin, end, position, delta]`, as those of a [`KvView`].
    pub entries: &'a [[i32; 5]],
    /// Tables, pages and windows of each KV head; `None`: as in our arena.
    pub reach: Option<Reach<'a>>,
    /// The bases of top-r pages or planes.
    pub bases: Option<Bases<'a>>,
}

impl<'a> PackedKv<'a> {
    /// The pages by their tokens alone: as exact ones, without elements.
    #[must_use]
    pub fn as_pages(&self) -> KvView<'a, ()> {
        let (tokens, dim) = (self.format.page_tokens(), self.format.head_dim());
        let geometry = PageGeometry::arena(self.layers, self.kv_heads, tokens, dim);
        let pages = self.packed.len() / self.format.page_bytes();
        // Of things without size a vector takes no memory, and leaking it none either.
        let cache = Vec::leak(vec![(); pages.saturating_mul(geometry.block_stride)]);
        let Self { layer, entries, reach, .. } = *self;
        KvView { cache, geometry, layer, entries, reach, scales: KvScales::ONE }
    }

    /// The page of a block that a head of this rank reads. Valid for blocks that `validate()` of
    /// the op accepted.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn page(&self, block: usize, rank: usize) -> &'a [u8] {
        let bytes = self.format.page_bytes();
        &self.packed[(block + rank) * bytes..][..bytes]
    }
}

/// Attention of one row per request over packed pages, which nobody unpacks: the result of
/// `attend_decode` over what they stand for ([`Step`](super::Step)).
#[derive(Debug)]
pub struct AttendPacked<'a, T> {
    /// One row per request, [B, H, D].
    pub queries: Queries<'a, T>,
    /// Keys and values of all requests.
    pub kv: PackedKv<'a>,
    /// Scale, rotation, window, soft cap.
    pub scoring: Scoring<'a>,
    /// [B+1]: entries of request b; with a reach [B·R+1], of request b and table r at b·R + r.
    pub entry_offsets: &'a [i32],
    /// [B, H, D], contiguous.
    pub out: &'a mut [T],
    /// [B, H], natural logarithm.
    pub lse: &'a mut [f32],
}

impl<T> AttendPacked<'_, T> {
    /// Proves that every row, entry and offset is in range and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        self.kv.format.pages_in(self.kv.packed.len())?;
        let kv = self.kv.as_pages();
        kv.validate(self.entry_offsets)?;
        self.queries.validate(&kv.geometry)?;
        self.scoring.validate(&kv.geometry, kv.scales, kv.reach)?;
        self.validate_bases(&kv)?;
        let requests = (self.entry_offsets.len() - 1) / kv.tables();
        ensure_len("q rows", requests, self.queries.vectors.rows)?;
        let (rows, heads) = (self.queries.vectors.rows, self.queries.vectors.heads);
        ensure_size("out", &[rows, heads, kv.geometry.head_dim], self.out.len())?;
        ensure_size("lse", &[rows, heads], self.lse.len())
    }

    /// Proves that every block that a head reads has the basis that its format needs.
    fn validate_bases(&self, kv: &KvView<'_, ()>) -> Result<(), OpError> {
        let format = &self.kv.format;
        let pages = self.kv.packed.len() / format.page_bytes();
        let Some(bases) = check_given(self.kv.bases.as_ref(), format, pages)? else {
            return Ok(());
        };
        bases.check_entries(format, kv, &self.scoring, self.entry_offsets)
    }
}
