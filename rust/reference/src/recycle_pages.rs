//! Selected pages into the slots of each row.

use kvweave_core::ops::{OpError, RecyclePages};

/// See [`RecyclePages`].
///
/// # Errors
/// What [`RecyclePages::validate`] refuses.
pub fn recycle_pages(params: RecyclePages<'_>) -> Result<(), OpError> {
    params.validate()?;
    let RecyclePages { pages, most, selected, pinned, slots, width, places, moves, .. } = params;
    let mut moved = 0;
    for (row, &number) in selected.iter().enumerate() {
        let chosen = &pages[row * most..][..number as usize];
        let held = &mut slots[row * width..][..width];
        let is_pinned = |slot: usize| pinned.is_some_and(|pins| pins[row * width + slot] != 0);
        let is_left = |&slot: &usize| !is_pinned(slot) && !chosen.contains(&held[slot]);
        let left: Vec<usize> = (0..width).filter(is_left).collect();
        let mut left = left.into_iter();
        let places = &mut places[row * most..][..most];
        places.fill(-1);
        for (place, &page) in places.iter_mut().zip(chosen) {
            let kept = held.iter().position(|&held| held == page);
            // There is a slot for each, as `validate` proved.
            let Some(slot) = kept.or_else(|| left.next()) else { continue };
            *place = slot as i32;
            if kept.is_none() {
                held[slot] = page;
                moves[moved] = [row as i32, page, slot as i32];
                moved += 1;
            }
        }
    }
    params.count.fill(moved as i32);
    params.refused.fill(0);
    Ok(())
}
