//! Attention of one row per request over packed pages.

use kvweave_core::ops::{AttendDecode, AttendPacked, Element, Entry, KvView, OpError};

use crate::attend_decode;
use crate::pack_pages::stands_for;

/// See [`AttendPacked`]: by definition `attend_decode` over all pages that are read, unpacked.
///
/// # Errors
/// What [`AttendPacked::validate`] refuses.
pub fn attend_packed<T: Element>(params: AttendPacked<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    let AttendPacked { queries, kv, scoring, entry_offsets, out, lse } = params;
    let pages = kv.as_pages();
    let geometry = pages.geometry;
    let mut cache = vec![0.0f32; pages.cache.len()];
    for head in (0..geometry.kv_heads).map(|head| pages.head(head, &scoring)) {
        for request in 0..queries.vectors.rows {
            for &row in &pages.entries[pages.span(entry_offsets, request, head.table)] {
                let block = Entry::new(row).block;
                let page = kv.page(block, head.rank);
                let read = stands_for(&kv.format, kv.bases, (block, head.rank), page).concat();
                let start = (block + head.rank) * geometry.block_stride;
                cache[start..start + read.len()].copy_from_slice(&read);
            }
        }
    }
    let kv = KvView {
        cache: cache.as_slice(),
        geometry,
        layer: pages.layer,
        entries: pages.entries,
        reach: pages.reach,
        scales: pages.scales,
    };
    attend_decode(AttendDecode { queries, kv, scoring, entry_offsets, out, lse })
}
