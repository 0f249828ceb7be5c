//! Params of `write_pages`.

use super::error::{OpError, OpErrorKind, ensure, ensure_len};
use super::geometry::PageGeometry;
use super::queries::HeadRows;

/// Scatters new keys and values of one layer into pages: row r goes to `slots[r]`.
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
}

impl<T> WritePages<'_, T> {
    /// Proves that every slot is in range, none is written twice and the shapes agree.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        self.geometry.check_counts()?;
        ensure(self.layer < self.geometry.layers, OpErrorKind::OutOfRange, "layer", || {
            (format!("a layer below {}", self.geometry.layers), self.layer)
        })?;
        for (what, rows) in [("k", &self.keys), ("v", &self.values)] {
            rows.validate(what)?;
            ensure_len("slots", rows.rows, self.slots.len())?;
            ensure_len("heads of k and v", self.geometry.kv_heads, rows.heads)?;
            ensure_len("head_dim of k and v", self.geometry.head_dim, rows.head_dim)?;
        }
        let mut sorted = self.slots.to_vec();
        if !sorted.is_sorted() {
            sorted.sort_unstable();
        }
        for &[block, slot] in &sorted {
            check_slot(&self.geometry, block, slot)?;
        }
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            let got = format!("{:?} twice", pair[0]);
            return Err(OpError::new(OpErrorKind::Overlap, "slots", "every slot once", got));
        }
        let mut blocks: Vec<i32> = sorted.iter().map(|&[block, _]| block).collect();
        blocks.dedup();
        let Some(&last) = blocks.last() else { return Ok(()) };
        self.geometry.check_inside(last as usize, self.layer, self.cache.len())?;
        self.geometry.check_disjoint(&blocks)
    }
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
