//! Summaries of pages by which a decode step chooses what to read.

use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_rows};
use super::fp8::Fp8E4m3;
use super::fp8_bounds::Fp8Bounds;
use super::geometry::PageGeometry;

/// Least, greatest and mean key of a page, element by element: what min–max scores (FlexiCache,
/// after Quest) and mean-key scores (MosaicKV, §5.1) need of it.
///
/// A page does not remember which of its slots hold tokens, so the caller says it: `held` names
/// blocks and slot ranges, and the bounds of their pages become those of the keys that lie in
/// these slots *after* the call's own writes. Nothing is carried over from before. So a page that
/// is filled over several calls, or has a slot written again, is right whenever it is named, and
/// a page that is not named keeps its bounds.
///
/// A key that is NaN in an element makes all three NaN there. The mean is the sum in slot order in
/// f64, divided in f64 and rounded once, so every version has the same bits.
#[derive(Debug)]
pub struct PageBounds<'a> {
    /// A row for each page. That of (block, layer, head) has the number of its page in our arena,
    /// `block + layer·G + head`.
    pub values: BoundValues<'a>,
    /// Rows `[block, begin, end]`: slots `[begin, end)` hold tokens, at least one. Never the null
    /// block, and every block at most once unless `rows` say where its bounds lie.
    pub held: &'a [[i32; 3]],
    /// Where bounds lie elsewhere than their pages: of each held block the row that stands for its
    /// number. Rows of different blocks do not overlap.
    pub rows: Option<&'a [i32]>,
}

/// What bounds are written to, contiguous.
#[derive(Debug)]
pub enum BoundValues<'a> {
    /// [pages, 3, D]: min, max, mean.
    F32(&'a mut [f32]),
    /// Rounded: see [`round_bounds`](super::round_bounds).
    Fp8(Fp8Bounds<&'a mut [Fp8E4m3], &'a mut [u8]>),
}

impl BoundValues<'_> {
    /// How many pages have bounds in them.
    ///
    /// # Errors
    /// When the length is none of whole pages.
    pub fn pages(&self, head_dim: usize) -> Result<usize, OpError> {
        match self {
            Self::F32(values) => ensure_rows("bounds", PageBounds::row_len(head_dim), values.len()),
            Self::Fp8(bounds) => bounds.pages(head_dim),
        }
    }
}

impl PageBounds<'_> {
    /// What stands for the number of the held block `i` among rows of bounds.
    #[must_use]
    pub fn first_row(held: &[[i32; 3]], rows: Option<&[i32]>, i: usize) -> usize {
        rows.map_or(held[i][0], |rows| rows[i]) as usize
    }

    /// Elements of one page's bounds in f32.
    #[must_use]
    pub fn row_len(head_dim: usize) -> usize {
        3 * head_dim
    }
}

/// Proves that the named slots lie in a cache of `cache_len` elements and their bounds among those
/// of `described` pages, and that no bounds are written twice. Memory may be elsewhere, such as on
/// a device.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_bounds(
    (held, rows): (&[[i32; 3]], Option<&[i32]>),
    geometry: &PageGeometry,
    layer: usize,
    cache_len: usize,
    described: usize,
) -> Result<(), OpError> {
    let PageGeometry { kv_heads, block_stride, layer_stride, head_stride, .. } = *geometry;
    let paged =
        block_stride == head_stride && Some(layer_stride) == head_stride.checked_mul(kv_heads);
    ensure(paged, OpErrorKind::Shape, "geometry", || {
        let got = (block_stride, layer_stride, head_stride);
        ("blocks, layers and heads a page apart, for bounds", format!("strides {got:?}"))
    })?;
    let slots = geometry.page_tokens as i64;
    for &[block, begin, end] in held {
        ensure(block > 0, OpErrorKind::OutOfRange, "held block", || {
            ("at least 1, as block 0 is the null block", block)
        })?;
        let in_page = 0 <= begin && begin < end && i64::from(end) <= slots;
        ensure(in_page, OpErrorKind::OutOfRange, "held slots", || {
            (format!("0 ≤ begin < end ≤ {slots}"), format!("[{begin}, {end})"))
        })?;
    }
    let mut blocks: Vec<i32> = held.iter().map(|row| row[0]).collect();
    blocks.sort_unstable();
    let twice = blocks.windows(2).find(|pair| pair[0] == pair[1]);
    if let Some(pair) = twice.filter(|_| rows.is_none()) {
        let got = format!("{} twice", pair[0]);
        return Err(OpError::new(OpErrorKind::Overlap, "held block", "every block once", got));
    }
    let Some(&last) = blocks.last() else { return Ok(()) };
    geometry.check_inside(last as usize, layer, cache_len)?;
    let last = rows.map_or(Ok(last), |rows| last_row(rows, held.len(), kv_heads))?;
    let before = layer.checked_add(1).and_then(|layers| layers.checked_mul(kv_heads));
    let pages = before.map_or(usize::MAX, |before| before.saturating_add(last as usize));
    ensure(pages <= described, OpErrorKind::OutOfRange, "bounds", || {
        (format!("those of at least {pages} pages"), described)
    })?;
    if rows.is_some() { Ok(()) } else { geometry.check_disjoint(&blocks) }
}

/// The last of `rows`, which have to be one for each held block, and as far apart as its heads.
fn last_row(rows: &[i32], held: usize, kv_heads: usize) -> Result<i32, OpError> {
    ensure_len("rows of bounds", held, rows.len())?;
    let mut rows = rows.to_vec();
    rows.sort_unstable();
    ensure(rows[0] >= 0, OpErrorKind::OutOfRange, "rows of bounds", || ("at least 0", rows[0]))?;
    let near = rows.windows(2).find(|pair| ((pair[1] - pair[0]) as usize) < kv_heads);
    ensure(near.is_none(), OpErrorKind::Overlap, "rows of bounds", || {
        (format!("{kv_heads} apart"), format!("{near:?}"))
    })?;
    Ok(rows[rows.len() - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_of_whole_pages() {
        let mut torn = vec![0.0; 3 * 8 + 1];
        let error = BoundValues::F32(&mut torn).pages(8).expect_err("a refusal");
        assert_eq!((error.kind(), error.what()), (OpErrorKind::Shape, "bounds"));
    }

    #[test]
    fn a_block_whose_bounds_lie_elsewhere_may_be_held_several_times() {
        let geometry = PageGeometry::arena(1, 2, 4, 8);
        let held =
            |rows| validate_bounds((&[[6, 0, 4], [6, 1, 2]], rows), &geometry, 0, 8 * 2 * 4 * 8, 4);
        assert_eq!(held(Some(&[0, 2])), Ok(()));
        assert_eq!(held(Some(&[2, 1])).expect_err("a refusal").what(), "rows of bounds");
        assert_eq!(held(None).expect_err("a refusal").what(), "held block");
    }
}
