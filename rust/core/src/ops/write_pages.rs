//! Params of `write_pages`.

use super::error::{OpError, OpErrorKind, ensure, ensure_len};
use super::geometry::PageGeometry;
use super::page_bounds::{PageBounds, validate_bounds};
use super::queries::HeadRows;

/// Scatters new keys and values of one layer into pages: row r goes to `slots[r]`. Then brings the
/// bounds of pages up to date, where they are wanted.
#[derive(Debug)]
pub struct WritePages<'a, T> {
    /// The whole paged tensor.
    pub cache: &'a mut [T],
    /// Its strides.
    pub geometry: PageGeometry,
    /// The layer written.
    pub layer: usize,
    /// [R, G, D].
    pub keys: HeadRows<'a, T>,
    /// [R, G, D].
    pub values: HeadRows<'a, T>,
    /// [R] pairs `[block, slot]`, all different; never the null block.
    pub slots: &'a [[i32; 2]],
    /// Pages whose bounds are computed anew; they need not be those written.
    pub bounds: Option<PageBounds<'a>>,
}

impl<T> WritePages<'_, T> {
    /// Proves that every slot is in range, none is written twice and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let vectors = [("k", &self.keys), ("v", &self.values)];
        validate_rows(&self.geometry, self.layer, vectors, self.slots.len())?;
        let len = self.cache.len();
        validate_slots(self.slots, &self.geometry, self.layer, len)?;
        let Some(bounds) = &self.bounds else { return Ok(()) };
        validate_bounds(bounds.held, &self.geometry, self.layer, len, bounds.values.len())
    }
}

/// Proves that new keys and values have the shape that the geometry and so many slots want. Of
/// their elements, only the number is looked at.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_rows<T>(
    geometry: &PageGeometry,
    layer: usize,
    vectors: [(&'static str, &HeadRows<'_, T>); 2],
    slots: usize,
) -> Result<(), OpError> {
    geometry.check_counts()?;
    ensure(layer < geometry.layers, OpErrorKind::OutOfRange, "layer", || {
        (format!("a layer below {}", geometry.layers), layer)
    })?;
    for (what, rows) in vectors {
        rows.validate(what)?;
        ensure_len("slots", rows.rows, slots)?;
        ensure_len("heads of k and v", geometry.kv_heads, rows.heads)?;
        ensure_len("head_dim of k and v", geometry.head_dim, rows.head_dim)?;
    }
    Ok(())
}

/// Proves that slots lie in a cache of `len` elements, all different and none of the null block.
/// Memory may be elsewhere, such as on a device.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_slots(
    slots: &[[i32; 2]],
    geometry: &PageGeometry,
    layer: usize,
    len: usize,
) -> Result<(), OpError> {
    let mut sorted = slots.to_vec();
    if !sorted.is_sorted() {
        sorted.sort_unstable();
    }
    for &[block, slot] in &sorted {
        check_slot(geometry, block, slot)?;
    }
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        let got = format!("{:?} twice", pair[0]);
        return Err(OpError::new(OpErrorKind::Overlap, "slots", "every slot once", got));
    }
    let mut blocks: Vec<i32> = sorted.iter().map(|&[block, _]| block).collect();
    blocks.dedup();
    let Some(&last) = blocks.last() else { return Ok(()) };
    geometry.check_inside(last as usize, layer, len)?;
    geometry.check_disjoint(&blocks)
}

fn check_slot(geometry: &PageGeometry, block: i32, slot: i32) -> Result<(), OpError> {
    ensure(block > 0, OpErrorKind::OutOfRange, "slot block", || {
        ("at least 1, as block 0 is the null block", block)
    })?;
    let in_page = slot >= 0 && (slot as usize) < geometry.page_tokens;
    ensure(in_page, OpErrorKind::OutOfRange, "slot", || {
        (format!("a slot from 0 to {}", geometry.page_tokens - 1), slot)
    })
}
