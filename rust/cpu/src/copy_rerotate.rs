//! Tokens copied between blocks, keys rotated to their new positions.

use kvweave_core::ops::{CopyRerotate, CopyRun, Element, OpError};
use rayon::prelude::*;

use crate::disjoint::Disjoint;
use crate::turn::{Turn, Turns};

/// See [`CopyRerotate`].
///
/// # Errors
/// What [`CopyRerotate::validate`] refuses.
pub fn copy_rerotate<T: Element>(params: CopyRerotate<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let CopyRerotate { cache, geometry, copies, rope } = params;
    let needed = (0..geometry.layers)
        .filter(|&layer| rope.first_alike(layer) == layer)
        .flat_map(|layer| copies.iter().map(move |copy| (layer, copy[5])));
    let turns = Turns::new(rope, needed);
    let dim = geometry.head_dim;
    let cache = Disjoint::new(cache);
    let tasks = copies.len() * geometry.layers;
    (0..tasks).into_par_iter().with_min_len(4).for_each_init(
        || vec![0.0; dim],
        |wide, task| {
            // All layers of a copy together: its block is one run of the arena.
            let copy = CopyRun::new(copies[task / geometry.layers]);
            let layer = task % geometry.layers;
            let turn = (copy.delta != 0).then(|| turns.get(rope, layer, copy.delta));
            for head in 0..geometry.kv_heads {
                for i in 0..copy.count {
                    let (from, to) = (copy.src_slot + i, copy.dst_slot + i);
                    let source = geometry.key_offset(copy.src_block, layer, head, from);
                    let target = geometry.key_offset(copy.dst_block, layer, head, to);
                    // SAFETY: `validate` proved that no block is both read and written, that no
                    // slot is written twice and that different tokens share no element.
                    let (source, target) =
                        unsafe { (cache.shared(source, dim), cache.piece(target, dim)) };
                    copy_key(source, target, turn, wide);
                    let source = geometry.value_offset(copy.src_block, layer, head, from);
                    let target = geometry.value_offset(copy.dst_block, layer, head, to);
                    // SAFETY: as for the key.
                    unsafe { cache.piece(target, dim).copy_from_slice(cache.shared(source, dim)) };
                }
            }
        },
    );
    Ok(())
}

fn copy_key<T: Element>(source: &[T], target: &mut [T], turn: Option<Turn<'_>>, wide: &mut [f32]) {
    let Some(turn) = turn else {
        target.copy_from_slice(source);
        return;
    };
    T::widen(source, wide);
    turn.forward(wide);
    T::narrow(wide, target);
}
