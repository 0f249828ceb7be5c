//! Tokens copied between blocks, keys rotated to their new positions.

use kvweave_core::ops::{CopyRerotate, CopyRun, Element, OpError};

use crate::rotate::rotate;

/// See [`CopyRerotate`].
///
/// # Errors
/// What [`CopyRerotate::validate`] refuses.
pub fn copy_rerotate<T: Element>(params: CopyRerotate<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let CopyRerotate { cache, geometry, copies, rope } = params;
    let dim = geometry.head_dim;
    for &row in copies {
        let copy = CopyRun::new(row);
        for layer in 0..geometry.layers {
            for head in 0..geometry.kv_heads {
                for i in 0..copy.count {
                    let (from, to) = (copy.src_slot + i, copy.dst_slot + i);
                    let source = geometry.key_offset(copy.src_block, layer, head, from);
                    let target = geometry.key_offset(copy.dst_block, layer, head, to);
                    cache.copy_within(source..source + dim, target);
                    if copy.delta != 0 {
                        let key = &mut cache[target..target + dim];
                        let mut wide: Vec<f64> = key.iter().map(|x| x.to_f64()).collect();
                        rotate(&mut wide, rope, layer, i64::from(copy.delta));
                        for (x, wide) in key.iter_mut().zip(wide) {
                            *x = T::from_f64(wide);
                        }
                    }
                    let source = geometry.value_offset(copy.src_block, layer, head, from);
                    let target = geometry.value_offset(copy.dst_block, layer, head, to);
                    cache.copy_within(source..source + dim, target);
                }
            }
        }
    }
    Ok(())
}
