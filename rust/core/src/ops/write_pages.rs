//! Params of `write_pages`.

use super::element::Element;
use super::error::{OpError, OpErrorKind, ensure, ensure_len};
use super::geometry::PageGeometry;
use super::page_bounds::{PageBounds, validate_bounds};
use super::queries::HeadRows;
use super::reach::Reach;
use super::scales::KvScales;
use super::write_slots::WriteSlots;

/// Scatters new keys and values of one layer into pages: row r goes to `slots[r]`. Then brings the
/// bounds of pages up to date, where they are wanted.
///
/// With a reach, heads have tables of their own: row r of a head goes to `slots[table·R + r]`, into
/// page `rank` of that block, and nowhere where the block is −1 (a local head keeps its sink and
/// window only: RedKnot, §4.3).
#[derive(Debug)]
pub struct WritePages<'a, T, C = T> {
    /// The whole paged tensor.
    pub cache: &'a mut [C],
    /// Its strides.
    pub geometry: PageGeometry,
    /// The layer written.
    pub layer: usize,
    /// What rows are divided by before they are rounded to the cache's elements; bounds are those
    /// of what is stored, multiplied again.
    pub scales: KvScales,
    /// [R, G, D].
    pub keys: HeadRows<'a, T>,
    /// [R, G, D].
    pub values: HeadRows<'a, T>,
    /// [R] or, with a reach, [tables, R] pairs `[block, slot]`, all different in a table; never the
    /// null block. Pages of different heads do not overlap.
    pub slots: &'a [[i32; 2]],
    /// Table and page of each head, where they differ.
    pub reach: Option<Reach<'a>>,
    /// Pages whose bounds are computed anew; they need not be those written. Not with a reach.
    pub bounds: Option<PageBounds<'a>>,
}

impl<'a, T, C: Element> WritePages<'a, T, C> {
    /// Proves that every slot is in range, none is written twice and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let vectors = [("k", &self.keys), ("v", &self.values)];
        validate_rows(&self.geometry, self.layer, vectors, (self.slots.len(), self.reach))?;
        self.scales.validate(C::QUANTISED)?;
        let len = self.cache.len();
        self.write_slots().validate(len)?;
        let Some(bounds) = &self.bounds else { return Ok(()) };
        refuse_bounds(self.reach)?;
        let held = (bounds.held, bounds.rows);
        let described = bounds.values.pages(self.geometry.head_dim)?;
        validate_bounds(held, &self.geometry, self.layer, len, described)
    }

    /// Where each row and head goes.
    #[must_use]
    pub fn write_slots(&self) -> WriteSlots<'a> {
        let Self { geometry, layer, slots, reach, .. } = *self;
        WriteSlots { geometry, layer, slots, rows: self.keys.rows, reach }
    }
}

/// Proves that new keys and values have the shape that the geometry and so many slots, in the
/// tables of a reach, want, and that the reach fits. Of their elements, only the number is looked
/// at.
///
/// # Errors
/// An [`OpError`] that names the argument.
pub fn validate_rows<T>(
    geometry: &PageGeometry,
    layer: usize,
    vectors: [(&'static str, &HeadRows<'_, T>); 2],
    (slots, reach): (usize, Option<Reach<'_>>),
) -> Result<(), OpError> {
    geometry.check_counts()?;
    ensure(layer < geometry.layers, OpErrorKind::OutOfRange, "layer", || {
        (format!("a layer below {}", geometry.layers), layer)
    })?;
    reach.map_or(Ok(()), |reach| reach.validate(geometry.kv_heads))?;
    let tables = reach.map_or(1, |reach| reach.tables);
    for (what, rows) in vectors {
        rows.validate(what)?;
        ensure_len("slots", rows.rows.saturating_mul(tables), slots)?;
        ensure_len("heads of k and v", geometry.kv_heads, rows.heads)?;
        ensure_len("head_dim of k and v", geometry.head_dim, rows.head_dim)?;
    }
    Ok(())
}

/// Bounds are rows of the pages of a layer's block, which a head group's block is not.
///
/// # Errors
/// `Unsupported` when there is a reach.
pub fn refuse_bounds(reach: Option<Reach<'_>>) -> Result<(), OpError> {
    ensure(reach.is_none(), OpErrorKind::Unsupported, "bounds", || ("none beside a reach", "both"))
}
