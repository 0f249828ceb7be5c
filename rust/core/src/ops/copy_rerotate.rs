//! Params of `copy_rerotate`.

use super::error::{OpError, OpErrorKind, ensure};
use super::geometry::PageGeometry;
use super::rope::RopeTable;

/// One row of a copy table, decoded: `count` tokens of every (layer, head).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    /// Block read.
    pub src_block: usize,
    /// First slot read.
    pub src_slot: usize,
    /// Block written.
    pub dst_block: usize,
    /// First slot written.
    pub dst_slot: usize,
    /// Tokens.
    pub count: usize,
    /// New position − cached position.
    pub delta: i32,
}

impl CopyRun {
    /// Decodes a row `[src_block, src_slot, dst_block, dst_slot, count, delta]` that `validate()`
    /// accepted.
    #[must_use]
    pub fn new(row: [i32; 6]) -> Self {
        let [src_block, src_slot, dst_block, dst_slot, count, delta] = row;
        Self {
            src_block: src_block as usize,
            src_slot: src_slot as usize,
            dst_block: dst_block as usize,
            dst_slot: dst_slot as usize,
            count: count as usize,
            delta,
        }
    }
}

/// One page of every block copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPage {
    /// Elements from the start of a block that is written.
    pub offset: usize,
    /// Elements from the start of a block that is read.
    pub source: usize,
    /// The layer whose frequencies rotate its keys.
    pub layer: usize,
}

/// Another paged tensor that blocks are read from.
#[derive(Clone, Copy, Debug)]
pub struct CopySource<'a, T> {
    /// All of it.
    pub pages: &'a [T],
    /// Its strides; layers, heads and head dim are the cache's, pages may be of another size.
    pub geometry: PageGeometry,
}

/// Copies tokens of all pages of blocks to others: keys rotated by `delta` (Δ-RoPE), values as
/// they are. A key is widened, rotated and rounded once; `delta = 0` copies its bits.
///
/// Blocks hold all layers and heads, or the pages of a head group.
#[derive(Debug)]
pub struct CopyRerotate<'a, T> {
    /// The whole paged tensor.
    pub cache: &'a mut [T],
    /// Its strides.
    pub geometry: PageGeometry,
    /// Where blocks are read; none: in the cache itself.
    pub source: Option<CopySource<'a, T>>,
    /// Rows `[src_block, src_slot, dst_block, dst_slot, count, delta]`. No block of the cache is
    /// both read and written in one call, and no slot is written twice.
    pub copies: &'a [[i32; 6]],
    /// Rotation of the model.
    pub rope: &'a RopeTable,
    /// Blocks of a head group: the layer of each page, page r lying `r · head_stride` elements
    /// after the block. A layer occurs at most G times.
    pub layers: Option<&'a [i32]>,
}

impl<T> CopyRerotate<'_, T> {
    /// Proves that every run is in range, written runs are disjoint and no block is both read and
    /// written.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let pages = self.layers.map(<[i32]>::len);
        let source = self.source.as_ref().map(|source| (source.geometry, source.pages.len()));
        let (geometry, len) = (&self.geometry, self.cache.len());
        validate_copies(self.copies, geometry, self.rope, (len, pages), source)?;
        self.layers.map_or(Ok(()), |layers| validate_layers(layers, &self.geometry))
    }

    /// The pages of a block, in order. Valid for what `validate()` accepted.
    #[must_use]
    pub fn pages(&self) -> Vec<BlockPage> {
        let (geometry, read) = (self.geometry, self.read_geometry());
        let page = |layer: usize, (place, head): (usize, usize)| BlockPage {
            offset: geometry.key_offset(0, place, head, 0),
            source: read.key_offset(0, place, head, 0),
            layer,
        };
        if let Some(layers) = self.layers {
            let layers = layers.iter().map(|&layer| layer as usize).enumerate();
            return layers.map(|(r, layer)| page(layer, (0, r))).collect();
        }
        let heads = |layer| (0..geometry.kv_heads).map(move |head| (layer, head));
        let pairs = (0..geometry.layers).flat_map(heads);
        pairs.map(|(layer, head)| page(layer, (layer, head))).collect()
    }

    /// The strides of what is read.
    #[must_use]
    pub fn read_geometry(&self) -> PageGeometry {
        self.source.as_ref().map_or(self.geometry, |source| source.geometry)
    }
}

/// Proves that every page of a head group's blocks has a layer.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_layers(layers: &[i32], geometry: &PageGeometry) -> Result<(), OpError> {
    let mut of_layer = vec![0; geometry.layers];
    for &layer in layers {
        let count = usize::try_from(layer).ok().and_then(|layer| of_layer.get_mut(layer));
        let known = count.map(|count| *count += 1).is_some();
        ensure(known, OpErrorKind::OutOfRange, "layers", || {
            (format!("layers from 0 to {}", geometry.layers - 1), layer)
        })?;
    }
    let most = of_layer.iter().max().copied().unwrap_or(0);
    ensure(most <= geometry.kv_heads, OpErrorKind::OutOfRange, "layers", || {
        (format!("at most {} pages of a layer, one a KV head", geometry.kv_heads), most)
    })
}

/// The same as [`CopyRerotate::validate`] but for the layers of pages: for blocks of so many
/// `pages`, or of all layers and heads, in a cache of `len` elements, read there or in a `source`
/// of its own strides and elements. Memory may be elsewhere, such as on a device.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_copies(
    copies: &[[i32; 6]],
    geometry: &PageGeometry,
    rope: &RopeTable,
    (len, pages): (usize, Option<usize>),
    source: Option<(PageGeometry, usize)>,
) -> Result<(), OpError> {
    geometry.check_counts()?;
    rope.check_fits(geometry)?;
    ensure(pages != Some(0), OpErrorKind::Shape, "layers", || ("at least 1 page", 0))?;
    let read_geometry = source.map_or(*geometry, |(of_source, _)| of_source);
    read_geometry.check_counts()?;
    check_alike(geometry, &read_geometry)?;
    for copy in copies {
        check_run(&read_geometry, geometry, copy)?;
    }
    let mut written: Vec<_> = copies.iter().map(|c| (c[2], c[3], c[3] + c[4])).collect();
    written.sort_unstable();
    for pair in written.windows(2) {
        let ((block, _, end), (next, begin, _)) = (pair[0], pair[1]);
        ensure(block != next || end <= begin, OpErrorKind::Overlap, "copies", || {
            ("every slot written once", format!("slot {begin} of block {next} twice"))
        })?;
    }
    let mut blocks: Vec<i32> = written.iter().map(|&(block, ..)| block).collect();
    blocks.dedup();
    let mut read: Vec<i32> = copies.iter().map(|c| c[0]).collect();
    read.sort_unstable();
    read.dedup();
    let of_block = |geometry: &PageGeometry| match pages {
        Some(pages) => PageGeometry { layers: 1, kv_heads: pages, ..*geometry },
        None => *geometry,
    };
    // A call without copies names no block, but its geometry still says how many pages a block has,
    // and callers allocate by that: the null block at least must lie inside.
    let inside = |tensor: &str, geometry: &PageGeometry, last: Option<&i32>, len: usize| {
        let (geometry, last) = (of_block(geometry), last.map_or(0, |&last| last as usize));
        geometry.check_inside_of(tensor, last, geometry.layers - 1, len)
    };
    if let Some((of_source, len)) = source {
        inside("the source", &of_source, read.last(), len)?;
    } else {
        if let Some(both) = read.iter().find(|block| blocks.binary_search(block).is_ok()) {
            let got = format!("block {both} both read and written");
            let expected = "blocks either read or written";
            return Err(OpError::new(OpErrorKind::Overlap, "copies", expected, got));
        }
        blocks.extend(read);
        blocks.sort_unstable();
    }
    inside("the cache", geometry, blocks.last(), len)?;
    of_block(geometry).check_disjoint(&blocks)
}

/// Blocks that are read have the pages of those that are written, if of another size.
fn check_alike(geometry: &PageGeometry, read: &PageGeometry) -> Result<(), OpError> {
    let shape = |of: &PageGeometry| [of.layers, of.kv_heads, of.head_dim];
    ensure(shape(geometry) == shape(read), OpErrorKind::Shape, "source", || {
        let text = |of| format!("layers, heads and head dim {:?}", shape(of));
        (text(geometry), text(read))
    })
}

fn check_run(read: &PageGeometry, geometry: &PageGeometry, copy: &[i32; 6]) -> Result<(), OpError> {
    let &[src_block, src_slot, dst_block, dst_slot, count, _] = copy;
    ensure(src_block >= 0 && dst_block > 0, OpErrorKind::OutOfRange, "copy blocks", || {
        ("a source of at least 0 and a target of at least 1", format!("{src_block}, {dst_block}"))
    })?;
    let in_page = |slot: i32, of: &PageGeometry| {
        slot >= 0 && i64::from(slot) + i64::from(count) <= of.page_tokens as i64
    };
    let inside = count > 0 && in_page(src_slot, read) && in_page(dst_slot, geometry);
    ensure(inside, OpErrorKind::OutOfRange, "copy slots", || {
        let got = format!("{src_slot} and {dst_slot} with {count} tokens");
        let (from, to) = (read.page_tokens, geometry.page_tokens);
        let expected = if from == to {
            format!("at least 1 token within slots [0, {to})")
        } else {
            format!("at least 1 token within slots [0, {from}) and [0, {to})")
        };
        (expected, got)
    })
}
