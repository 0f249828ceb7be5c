//! The best pages of each row.

use kvweave_core::ops::{OpError, SelectPages};

/// See [`SelectPages`].
///
/// # Errors
/// What [`SelectPages::validate`] refuses.
pub fn select_pages(params: SelectPages<'_>) -> Result<(), OpError> {
    params.validate()?;
    let SelectPages { scores, width, counts, budgets, sink, recent, pages, most, selected } =
        params;
    for (row, &count) in counts.iter().enumerate() {
        let (count, budget) = (count as usize, budgets[row] as usize);
        let of_row = &scores[row * width..][..count];
        let always = |&page: &usize| page < sink || page + recent >= count;
        let (mut chosen, mut others): (Vec<usize>, Vec<usize>) = (0..count).partition(always);
        others.sort_by(|&a, &b| SelectPages::before((of_row[a], a), (of_row[b], b)));
        chosen.extend(others.into_iter().take(budget.saturating_sub(chosen.len())));
        chosen.sort_unstable();
        selected[row] = chosen.len() as i32;
        let mut chosen = chosen.into_iter().map(|page| page as i32);
        pages[row * most..][..most].fill_with(|| chosen.next().unwrap_or(-1));
    }
    Ok(())
}
