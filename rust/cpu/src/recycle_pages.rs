//! Selected pages into the slots of each row.

use kvweave_core::ops::{NO_PAGE, OpError, RecyclePages};
use rayon::prelude::*;

use crate::grain::least_tasks;

/// See [`RecyclePages`].
///
/// # Errors
/// What [`RecyclePages::validate`] refuses.
pub fn recycle_pages(params: RecyclePages<'_>) -> Result<(), OpError> {
    params.validate()?;
    let RecyclePages { pages, most, selected, pinned, slots, width, places, moves, .. } = params;
    params.count.fill(0);
    params.refused.fill(0);
    // Without pages or without slots nobody selected any.
    places.fill(-1);
    if most == 0 || width == 0 {
        return Ok(());
    }
    let least = least_tasks(selected.len(), selected.len() * (most + width));
    let rows = places.par_chunks_exact_mut(most).zip(slots.par_chunks_exact_mut(width));
    let brought: Vec<Vec<[i32; 3]>> = rows
        .enumerate()
        .with_min_len(least)
        .map_init(Scratch::default, |scratch, (row, (places, slots))| {
            let chosen = &pages[row * most..][..selected[row] as usize];
            let pinned = pinned.map(|pins| &pins[row * width..][..width]);
            scratch.recycle(row as i32, chosen, pinned, (slots, places))
        })
        .collect();
    let mut moved = 0;
    for (target, &step) in moves.iter_mut().zip(brought.iter().flatten()) {
        *target = step;
        moved += 1;
    }
    params.count.fill(moved);
    Ok(())
}

/// What a thread needs of a row, kept for the next one.
#[derive(Default)]
struct Scratch {
    /// Pages that are held, ascending, and their slots: a key each.
    held: Vec<u64>,
    /// Slots that are not left to others.
    taken: Vec<bool>,
}

impl Scratch {
    /// Writes where the pages of a row are, and returns those that were in no slot.
    fn recycle(
        &mut self,
        row: i32,
        chosen: &[i32],
        pinned: Option<&[u8]>,
        (slots, places): (&mut [i32], &mut [i32]),
    ) -> Vec<[i32; 3]> {
        let holds = |&(_, &page): &(usize, &i32)| page != NO_PAGE;
        let key = |(slot, &page): (usize, &i32)| u64::from(page as u32) << 32 | slot as u64;
        self.held.clear();
        self.held.extend(slots.iter().enumerate().filter(holds).map(key));
        self.held.sort_unstable();
        self.taken.clear();
        match pinned {
            Some(pins) => self.taken.extend(pins.iter().map(|&pin| pin != 0)),
            None => self.taken.resize(slots.len(), false),
        }
        let mut held = self.held.iter().copied().peekable();
        let mut missing = 0;
        for (place, &page) in places.iter_mut().zip(chosen) {
            while held.next_if(|key| ((key >> 32) as i32) < page).is_some() {}
            match held.next_if(|key| (key >> 32) as i32 == page) {
                Some(key) => {
                    let slot = key as u32;
                    *place = slot as i32;
                    self.taken[slot as usize] = true;
                }
                None => missing += 1,
            }
        }
        let mut brought = Vec::with_capacity(missing);
        let mut left = (0..slots.len()).filter(|&slot| !self.taken[slot]);
        for (place, &page) in places.iter_mut().zip(chosen).filter(|(place, _)| **place < 0) {
            // There is a slot for each, as `validate` proved.
            let Some(slot) = left.next() else { break };
            *place = slot as i32;
            slots[slot] = page;
            brought.push([row, page, slot as i32]);
        }
        brought
    }
}
