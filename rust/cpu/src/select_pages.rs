//! The best pages of each row.

use kvweave_core::ops::{OpError, SelectPages};
use rayon::prelude::*;

use crate::grain::least_tasks;

/// See [`SelectPages`].
///
/// # Errors
/// What [`SelectPages::validate`] refuses.
pub fn select_pages(params: SelectPages<'_>) -> Result<(), OpError> {
    params.validate()?;
    let SelectPages { scores, width, counts, budgets, sink, recent, pages, most, selected } =
        params;
    if most == 0 {
        selected.fill(0);
        return Ok(());
    }
    let select = |keys: &mut Vec<u64>,
                  (row, (pages, selected)): (usize, (&mut [i32], &mut i32))| {
        let (count, budget) = (counts[row] as usize, budgets[row] as usize);
        let of_row = scores.get(row * width..).map_or(&[][..], |scores| &scores[..count]);
        *selected = select_row(of_row, (sink, recent, budget), keys, pages) as i32;
    };
    let rows = pages.par_chunks_exact_mut(most).zip(selected).enumerate();
    let least = least_tasks(counts.len(), scores.len());
    rows.with_min_len(least).for_each_init(Vec::new, select);
    Ok(())
}

/// Writes what a row selects into `pages`, and returns how many there are.
fn select_row(
    scores: &[f32],
    (sink, recent, budget): (usize, usize, usize),
    keys: &mut Vec<u64>,
    pages: &mut [i32],
) -> usize {
    let count = scores.len();
    let last = count.saturating_sub(recent).max(sink.min(count));
    let first = sink.min(count);
    let room = budget - (first + (count - last)).min(budget);
    keys.clear();
    if last - first <= room {
        keys.extend((first..last).map(|page| page as u64));
    } else if room > 0 {
        // The greater key comes first; of equal scores that of the lower index is greater.
        let key = |page: usize| {
            u64::from(SelectPages::key(scores[page])) << 32 | u64::from(!(page as u32))
        };
        keys.extend((first..last).map(key));
        keys.select_nth_unstable_by(room - 1, |a, b| b.cmp(a));
        keys.truncate(room);
        keys.iter_mut().for_each(|key| *key = u64::from(!(*key as u32)));
        keys.sort_unstable();
    }
    let chosen = (0..first as u64).chain(keys.iter().copied()).chain(last as u64..count as u64);
    let mut selected = 0;
    for (place, page) in pages.iter_mut().zip(chosen) {
        *place = page as i32;
        selected += 1;
    }
    pages[selected..].fill(-1);
    selected
}
