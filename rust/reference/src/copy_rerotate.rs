//! Tokens copied between blocks, keys rotated to their new positions.

use kvweave_core::ops::{BlockPage, CopyRerotate, CopyRun, Element, OpError};

use crate::rotate::rotate;

/// See [`CopyRerotate`].
///
/// # Errors
/// What [`CopyRerotate::validate`] refuses.
pub fn copy_rerotate<T: Element>(params: CopyRerotate<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let (pages, read) = (params.pages(), params.read_geometry());
    let CopyRerotate { cache, geometry, source, copies, rope, .. } = params;
    let dim = geometry.head_dim;
    for copy in copies.iter().map(|&row| CopyRun::new(row)) {
        for &BlockPage { offset, source: source_offset, layer } in &pages {
            for i in 0..copy.count {
                let from = source_offset + read.key_offset(copy.src_block, 0, 0, copy.src_slot + i);
                let to = offset + geometry.key_offset(copy.dst_block, 0, 0, copy.dst_slot + i);
                let all = source.map_or(&*cache, |source| source.pages);
                let mut key = all[from..from + dim].to_vec();
                let value = all[from + read.value_offset..][..dim].to_vec();
                if copy.delta != 0 {
                    let mut wide: Vec<f64> = key.iter().map(|x| x.to_f64()).collect();
                    rotate(&mut wide, rope, layer, i64::from(copy.delta));
                    key = wide.into_iter().map(T::from_f64).collect();
                }
                cache[to..to + dim].copy_from_slice(&key);
                cache[to + geometry.value_offset..][..dim].copy_from_slice(&value);
            }
        }
    }
    Ok(())
}
