//! Where new keys and values go.

use super::error::{OpError, OpErrorKind, ensure};
use super::geometry::PageGeometry;
use super::reach::{HeadReach, Reach};

/// Block number of a token that a table does not keep.
const NOT_KEPT: i32 = -1;

/// The slots of new tokens, as each head of a layer finds them.
#[derive(Clone, Copy, Debug)]
pub struct WriteSlots<'a> {
    /// Strides of the paged tensor.
    pub geometry: PageGeometry,
    /// The layer written.
    pub layer: usize,
    /// Pairs `[block, slot]`: [R], or [tables, R] with a reach.
    pub slots: &'a [[i32; 2]],
    /// R.
    pub rows: usize,
    /// Which table and page each head has, where they differ; its windows and sinks do not matter.
    pub reach: Option<Reach<'a>>,
}

impl WriteSlots<'_> {
    /// First element of the key of (row, head), or `None` where it is not kept. Valid for what
    /// `validate()` accepted.
    #[must_use]
    pub fn key_offset(&self, row: usize, head: usize) -> Option<usize> {
        let Some(reach) = self.reach else {
            let [block, slot] = self.slots[row].map(|number| number as usize);
            return Some(self.geometry.key_offset(block, self.layer, head, slot));
        };
        let HeadReach { table, rank, .. } = HeadReach::new(reach.heads[head]);
        let [block, slot] = self.slots[table * self.rows + row];
        let kept = block != NOT_KEPT;
        kept.then(|| self.geometry.key_offset(block as usize, 0, rank, slot as usize))
    }

    /// Proves that every token that is kept lies in a cache of `len` elements, none in the null
    /// block, and that no element is written twice. Memory may be elsewhere, such as on a device.
    /// Counts and the reach are those that `validate_rows` accepted.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self, len: usize) -> Result<(), OpError> {
        if let Some(reach) = self.reach {
            return self.validate_heads(reach, len);
        }
        let blocks = self.blocks_of(self.slots)?;
        let Some(&last) = blocks.last() else { return Ok(()) };
        self.geometry.check_inside(last as usize, self.layer, len)?;
        self.geometry.check_disjoint(&blocks)
    }

    /// Tables of different groups name blocks of different sizes, so what must not overlap is
    /// pages: those of all heads together.
    fn validate_heads(&self, reach: Reach<'_>, len: usize) -> Result<(), OpError> {
        let geometry = &self.geometry;
        let extent = geometry.page_extent()?;
        let heads: Vec<HeadReach> = reach.heads.iter().map(|&row| HeadReach::new(row)).collect();
        // The null block's first page.
        let mut starts = vec![0];
        for table in 0..reach.tables {
            let blocks = self.blocks_of(&self.slots[table * self.rows..][..self.rows])?;
            let Some(&last) = blocks.last() else { continue };
            for head in heads.iter().filter(|head| head.table == table) {
                geometry.check_page(last as usize, head.rank, len)?;
                let page = |&block: &i32| geometry.key_offset(block as usize, 0, head.rank, 0);
                starts.extend(blocks.iter().map(page));
            }
        }
        // Stable, as it takes the runs that are in order as they are.
        starts.sort();
        for pair in starts.windows(2) {
            ensure(pair[1] - pair[0] >= extent, OpErrorKind::Overlap, "slots", || {
                let got = format!("pages at elements {} and {}", pair[0], pair[1]);
                ("heads whose pages do not overlap, nor the null block", got)
            })?;
        }
        Ok(())
    }

    /// The blocks of one table's slots, in order, each once.
    fn blocks_of(&self, slots: &[[i32; 2]]) -> Result<Vec<i32>, OpError> {
        let kept = |&&[block, _]: &&[i32; 2]| self.reach.is_none() || block != NOT_KEPT;
        let mut sorted: Vec<[i32; 2]> = slots.iter().filter(kept).copied().collect();
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
        Ok(blocks)
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
