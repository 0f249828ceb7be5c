//! New keys and values into pages.

use kvweave_core::ops::{Element, OpError, WritePages};
use rayon::prelude::*;

use crate::disjoint::Disjoint;

/// Rows of one task: below this, threads cost more than they bring.
const CHUNK: usize = 64;

/// See [`WritePages`].
///
/// # Errors
/// What [`WritePages::validate`] refuses.
pub fn write_pages<T: Element>(params: WritePages<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let WritePages { cache, geometry, layer, keys, values, slots } = params;
    let dim = geometry.head_dim;
    let cache = Disjoint::new(cache);
    slots.par_chunks(CHUNK).enumerate().for_each(|(chunk, slots)| {
        for (i, &[block, slot]) in slots.iter().enumerate() {
            let row = chunk * CHUNK + i;
            for head in 0..geometry.kv_heads {
                let (block, slot) = (block as usize, slot as usize);
                let key = geometry.key_offset(block, layer, head, slot);
                // SAFETY: `validate` proved that slots are all different and that different
                // (block, head, slot, key or value) share no element.
                unsafe { cache.piece(key, dim) }.copy_from_slice(keys.vector(row, head));
                let value = geometry.value_offset(block, layer, head, slot);
                // SAFETY: as for the key.
                unsafe { cache.piece(value, dim) }.copy_from_slice(values.vector(row, head));
            }
        }
    });
    Ok(())
}
