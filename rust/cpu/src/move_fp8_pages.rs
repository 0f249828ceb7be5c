//! Pages that are e4m3 where they all lie, into slots and back: a page a task.

use kvweave_core::ops::{Cached, Element, Fp8Arenas, Fp8E4m3, MoveFp8Pages, OpError, PageScale};
use rayon::prelude::*;

use crate::disjoint::Disjoint;
use crate::grain::least_tasks;

/// See [`MoveFp8Pages`].
///
/// # Errors
/// What [`MoveFp8Pages::validate`] refuses.
pub fn move_fp8_pages<T: Element>(params: MoveFp8Pages<'_, T>) -> Result<(), OpError>
where
    Fp8E4m3: Cached<T>,
{
    params.validate()?;
    let MoveFp8Pages { moves, page, arenas } = params;
    let ends: Vec<(usize, usize)> = moves.iter().collect();
    let least = least_tasks(ends.len(), ends.len() * (1 + page));
    let tasks = ends.par_iter().with_min_len(least);
    let side = page / 2;
    match arenas {
        Fp8Arenas::Fetch { home, scales, slots } => {
            let slots = Disjoint::new(slots);
            tasks.for_each(|&(from, to)| {
                // SAFETY: no page is written twice, as `validate` proved.
                let slot = unsafe { slots.piece(to * page, page) };
                let halves = home[from * page..][..page].chunks(side).zip(slot.chunks_mut(side));
                for (bits, (kept, numbers)) in scales[from].into_iter().zip(halves) {
                    PageScale::from_bits(bits).widen(kept, numbers);
                }
            });
        }
        Fp8Arenas::Spill { slots, home, scales } => {
            let (home, scales) = (Disjoint::new(home), Disjoint::new(scales));
            tasks.for_each(|&(from, to)| {
                // SAFETY: no page is written twice, as `validate` proved.
                let (kept, of_page) =
                    unsafe { (home.piece(to * page, page), &mut scales.piece(to, 1)[0]) };
                let halves = slots[from * page..][..page].chunks(side).zip(kept.chunks_mut(side));
                for (bits, (numbers, kept)) in of_page.iter_mut().zip(halves) {
                    let scale = PageScale::of(numbers);
                    scale.round(numbers, kept);
                    *bits = scale.to_bits();
                }
            });
        }
    }
    Ok(())
}
