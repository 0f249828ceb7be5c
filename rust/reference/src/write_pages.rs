//! New keys and values into pages.

use kvweave_core::ops::{Element, OpError, WritePages};

/// See [`WritePages`].
///
/// # Errors
/// What [`WritePages::validate`] refuses.
pub fn write_pages<T: Element>(params: WritePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let WritePages { cache, geometry, layer, keys, values, slots } = params;
    let dim = geometry.head_dim;
    for (row, &[block, slot]) in slots.iter().enumerate() {
        for head in 0..geometry.kv_heads {
            let (block, slot) = (block as usize, slot as usize);
            let key = geometry.key_offset(block, layer, head, slot);
            let value = geometry.value_offset(block, layer, head, slot);
            cache[key..key + dim].copy_from_slice(keys.vector(row, head));
            cache[value..value + dim].copy_from_slice(values.vector(row, head));
        }
    }
    Ok(())
}
