//! Tokens copied between blocks, keys rotated to their new positions.
//!
//! Cosines and sines are computed once per (frequencies, delta); a run whose tokens lie one after
//! the other is copied at once where it is not rotated.

use kvweave_core::ops::{BlockPage, CopyRerotate, CopyRun, Element, OpError, PageGeometry};
use rayon::prelude::*;

use crate::disjoint::Disjoint;
use crate::turn::{Turn, Turns};

/// Fewest (copy, layer) pairs of a task.
const FEWEST: usize = 4;

/// See [`CopyRerotate`].
///
/// # Errors
/// What [`CopyRerotate::validate`] refuses.
pub fn copy_rerotate<T: Element>(params: CopyRerotate<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let (pages, read) = (params.pages(), params.read_geometry());
    let CopyRerotate { cache, geometry, source: apart, copies, rope, .. } = params;
    // Pages of a layer lie next to each other and turn alike.
    let layers: Vec<&[BlockPage]> = pages.chunk_by(|a, b| a.layer == b.layer).collect();
    let mut alike: Vec<usize> = layers.iter().map(|of| rope.first_alike(of[0].layer)).collect();
    alike.sort_unstable();
    alike.dedup();
    let needed = alike.iter().flat_map(|&layer| copies.iter().map(move |copy| (layer, copy[5])));
    let turns = Turns::new(rope, needed);
    let cache = Disjoint::new(cache);
    let tasks = copies.len() * layers.len();
    (0..tasks).into_par_iter().with_min_len(FEWEST).for_each_init(
        || vec![0.0; geometry.head_dim],
        |wide, task| {
            // All layers of a copy together: its block is one run of the arena.
            let copy = CopyRun::new(copies[task / layers.len()]);
            let pages = layers[task % layers.len()];
            let turn = (copy.delta != 0).then(|| turns.get(rope, pages[0].layer, copy.delta));
            for BlockPage { offset, source, .. } in pages {
                let from = source + read.key_offset(copy.src_block, 0, 0, copy.src_slot);
                let to = offset + geometry.key_offset(copy.dst_block, 0, 0, copy.dst_slot);
                let steps = [read.token_stride, geometry.token_stride];
                let part = |(from, to, len): (usize, usize, usize)| {
                    // SAFETY: `validate` proved that no slot is written twice, that different
                    // tokens share no element and that no block of the cache is both read and
                    // written.
                    let target = unsafe { cache.piece(to, len) };
                    let source = apart.map_or_else(
                        // SAFETY: as above.
                        || unsafe { cache.shared(from, len) },
                        |apart| &apart.pages[from..from + len],
                    );
                    (source, target)
                };
                for_each_part(&geometry, steps, copy.count, turn.is_none(), |skips, len| {
                    let (source, target) = part((from + skips[0], to + skips[1], len));
                    copy_keys(source, target, turn, wide);
                });
                let (from, to) = (from + read.value_offset, to + geometry.value_offset);
                for_each_part(&geometry, steps, copy.count, true, |skips, len| {
                    let (source, target) = part((from + skips[0], to + skips[1], len));
                    target.copy_from_slice(source);
                });
            }
        },
    );
    Ok(())
}

/// Calls `copy([first element read, written], elements)`, counted from the run's own first, for the
/// whole run if that is contiguous and may be taken `at_once`, else for every token. `steps` are
/// the elements from one token to the next, read and written.
fn for_each_part(
    geometry: &PageGeometry,
    steps: [usize; 2],
    tokens: usize,
    at_once: bool,
    mut copy: impl FnMut([usize; 2], usize),
) {
    let dim = geometry.head_dim;
    if at_once && steps == [dim, dim] {
        return copy([0, 0], tokens * dim);
    }
    for token in 0..tokens {
        copy(steps.map(|step| token * step), dim);
    }
}

fn copy_keys<T: Element>(source: &[T], target: &mut [T], turn: Option<Turn<'_>>, wide: &mut [f32]) {
    let Some(turn) = turn else {
        target.copy_from_slice(source);
        return;
    };
    T::widen(source, wide);
    turn.forward(wide);
    T::narrow(wide, target);
}
