//! Tokens copied between blocks, keys rotated to their new positions.

use kvweave_core::ops::{BlockPage, CopyRerotate, CopyRun, Element, OpError};

use crate::rotate::rotate;

/// See [`CopyRerotate`].
///
/// # Errors
/// What [`CopyRerotate::validate`] refuses.
pub fn copy_rerotate<T: Element>(params: CopyRerotate<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let pages = params.pages();
    let CopyRerotate { cache, geometry, copies, rope, .. } = params;
    let dim = geometry.head_dim;
    for copy in copies.iter().map(|&row| CopyRun::new(row)) {
        for &BlockPage { offset, layer } in &pages {
            for i in 0..copy.count {
                let key = |block, slot| offset + geometry.key_offset(block, 0, 0, slot);
                let source = key(copy.src_block, copy.src_slot + i);
                let target = key(copy.dst_block, copy.dst_slot + i);
                cache.copy_within(source..source + dim, target);
                if copy.delta != 0 {
                    let key = &mut cache[target..target + dim];
                    let mut wide: Vec<f64> = key.iter().map(|x| x.to_f64()).collect();
                    rotate(&mut wide, rope, layer, i64::from(copy.delta));
                    for (x, wide) in key.iter_mut().zip(wide) {
                        *x = T::from_f64(wide);
                    }
                }
                let [source, target] = [source, target].map(|key| key + geometry.value_offset);
                cache.copy_within(source..source + dim, target);
            }
        }
    }
    Ok(())
}
