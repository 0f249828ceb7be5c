//! Attention of one row per request over packed pages, a piece of them at a time.

use kvweave_core::ops::{AttendPacked, Element, OpError};

use crate::attend_decode::attend_rows;
use crate::attend_in_basis::attend_in_basis;

/// See [`AttendPacked`].
///
/// # Errors
/// What [`AttendPacked::validate`] refuses.
pub fn attend_packed<T: Element>(params: AttendPacked<'_, T>) -> Result<(), OpError> {
    params.validate()?;
    if let Some(bases) = params.kv.bases {
        attend_in_basis(params, bases);
        return Ok(());
    }
    let AttendPacked { queries, kv, scoring, entry_offsets, out, lse } = params;
    let pages = kv.as_pages();
    attend_rows((queries, pages, scoring), entry_offsets, (out, lse), |tile, kv_head, piece| {
        tile.load_packed((&kv, &pages), pages.head(kv_head, &scoring).rank, piece);
    });
    Ok(())
}
