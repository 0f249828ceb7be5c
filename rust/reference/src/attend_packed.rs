//! Attention of one row per request over packed pages.

use kvweave_core::ops::{AttendDecode, AttendPacked, Element, KvView, OpError};

use crate::attend_decode;
use crate::pack_pages::{packed_key, packed_value};

/// See [`AttendPacked`]: by definition `attend_decode` over all pages unpacked.
///
/// # Errors
/// What [`AttendPacked::validate`] refuses.
pub fn attend_packed<T: Element>(params: AttendPacked<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let AttendPacked { queries, kv, scoring, entry_offsets, out, lse } = params;
    let (format, pages) = (kv.format, kv.as_pages());
    let mut cache = vec![0.0f32; pages.cache.len()];
    for (number, page) in cache.chunks_exact_mut(pages.geometry.block_stride).enumerate() {
        let source = kv.page(number, 0);
        let (keys, values) = page.split_at_mut(pages.geometry.value_offset);
        for at in 0..keys.len() {
            let (token, channel) = (at / format.head_dim(), at % format.head_dim());
            keys[at] = packed_key(&format, source, token, channel);
            values[at] = packed_value(&format, source, token, channel);
        }
    }
    let kv = KvView {
        cache: cache.as_slice(),
        geometry: pages.geometry,
        layer: pages.layer,
        entries: pages.entries,
        reach: pages.reach,
        scales: pages.scales,
    };
    attend_decode(AttendDecode { queries, kv, scoring, entry_offsets, out, lse })
}
