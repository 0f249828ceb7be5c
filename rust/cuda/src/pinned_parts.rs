//! Copies cut where the host's memory was pinned in parts: the driver refuses one that lies in two.

use std::ops::Range;

use crate::ffi::CopiedRows;

/// Which side of a copy lies on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostSide {
    Source,
    Target,
}

/// What was pinned at once around an address, as `around` says; nothing if none of it is.
pub(crate) struct PinnedParts<F> {
    around: F,
    // The part that was asked for last: neighbours mostly lie in one.
    last: Range<u64>,
}

impl<F: FnMut(u64) -> Option<Range<u64>>> PinnedParts<F> {
    pub(crate) fn new(around: F) -> Self {
        Self { around, last: 0..0 }
    }

    /// Adds to `cut` copies that do what `rows` do, each within one part; nothing if some of the
    /// host's memory is not pinned.
    pub(crate) fn cut(
        &mut self,
        rows: CopiedRows,
        side: HostSide,
        cut: &mut Vec<CopiedRows>,
    ) -> Option<()> {
        let (begin, pitch) = match side {
            HostSide::Source => (rows.source, rows.source_pitch),
            HostSide::Target => (rows.target, rows.target_pitch),
        };
        let (pitch, width) = (pitch as u64, rows.width as u64);
        let mut row = 0;
        while row < rows.rows {
            let at = begin + row as u64 * pitch;
            let room = self.end(at)? - at;
            let taken = if room >= width {
                let whole = (room - width).checked_div(pitch).map_or(1, |more| more + 1);
                let taken = (rows.rows - row).min(usize::try_from(whole).unwrap_or(usize::MAX));
                cut.push(CopiedRows { rows: taken, ..moved(rows, row, 0) });
                taken
            } else {
                self.cut_row(rows, row, at, cut)?;
                1
            };
            row += taken;
        }
        Some(())
    }

    /// The same of one row, which begins `at` on the host and does not lie in one part.
    fn cut_row(
        &mut self,
        rows: CopiedRows,
        row: usize,
        at: u64,
        cut: &mut Vec<CopiedRows>,
    ) -> Option<()> {
        let mut done = 0;
        while done < rows.width {
            let from = at + done as u64;
            let room = usize::try_from(self.end(from)? - from).unwrap_or(usize::MAX);
            let width = room.min(rows.width - done);
            let (source_pitch, target_pitch) = (width, width);
            let whole = moved(rows, row, done);
            cut.push(CopiedRows { width, rows: 1, source_pitch, target_pitch, ..whole });
            done += width;
        }
        Some(())
    }

    /// The first address behind the part in which one lies.
    fn end(&mut self, address: u64) -> Option<u64> {
        if !self.last.contains(&address) {
            self.last = (self.around)(address).filter(|found| found.contains(&address))?;
        }
        Some(self.last.end)
    }
}

/// The same copy from a row and a byte of it on.
fn moved(rows: CopiedRows, row: usize, byte: usize) -> CopiedRows {
    CopiedRows {
        source: rows.source + (row * rows.source_pitch + byte) as u64,
        target: rows.target + (row * rows.target_pitch + byte) as u64,
        ..rows
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{HostSide, PinnedParts};
    use crate::ffi::CopiedRows;

    /// From where to where each byte goes, in order.
    fn bytes(rows: &[CopiedRows]) -> Vec<(u64, u64)> {
        let each = |copy: &CopiedRows| {
            let CopiedRows { source, target, width, rows, source_pitch, target_pitch } = *copy;
            (0..rows).flat_map(move |row| {
                let (from, to) = (row * source_pitch, row * target_pitch);
                (0..width)
                    .map(move |byte| (source + (from + byte) as u64, target + (to + byte) as u64))
            })
        };
        rows.iter().flat_map(each).collect()
    }

    proptest! {
        /// Every byte goes where it went, in order, and no copy reaches from one part into another.
        #[test]
        fn copies_are_the_same_within_parts(
            sizes in prop::collection::vec(1u64..40, 1..12),
            (width, rows) in (1usize..50, 1usize..8),
            gaps in (0usize..20, 0usize..20),
            first in 0u64..60,
            on_source in any::<bool>(),
        ) {
            let mut ends: Vec<u64> = sizes;
            for at in 1..ends.len() {
                ends[at] += ends[at - 1];
            }
            let around = |address: u64| {
                let at = ends.iter().position(|end| address < *end)?;
                Some(if at == 0 { 0 } else { ends[at - 1] }..ends[at])
            };
            let (source_pitch, target_pitch) = (width + gaps.0, width + gaps.1);
            let side = if on_source { HostSide::Source } else { HostSide::Target };
            let (source, target) = if on_source { (first, 1000) } else { (1000, first) };
            let copy = CopiedRows { source, target, width, rows, source_pitch, target_pitch };
            let on_host = |(from, to): (u64, u64)| if on_source { from } else { to };
            let wanted = bytes(&[copy]);
            let all_pinned = wanted.iter().all(|each| around(on_host(*each)).is_some());
            let mut cut = Vec::new();
            let found = PinnedParts::new(around).cut(copy, side, &mut cut);
            prop_assert_eq!(found.is_some(), all_pinned);
            if all_pinned {
                prop_assert_eq!(bytes(&cut), wanted);
                for copy in &cut {
                    let touched = bytes(&[*copy]);
                    let part = around(on_host(touched[0]));
                    prop_assert!(touched.iter().all(|each| around(on_host(*each)) == part));
                    prop_assert!(copy.source_pitch >= copy.width);
                    prop_assert!(copy.target_pitch >= copy.width);
                }
            }
        }
    }

    #[test]
    fn what_lies_in_one_part_stays_one_copy() {
        let copy = CopiedRows {
            source: 100,
            target: 7,
            width: 30,
            rows: 4,
            source_pitch: 50,
            target_pitch: 30,
        };
        let mut cut = Vec::new();
        PinnedParts::new(|_| Some(100..280)).cut(copy, HostSide::Source, &mut cut).expect("pinned");
        assert_eq!(cut.len(), 1);
        assert_eq!(bytes(&cut), bytes(&[copy]));
    }
}
