//! Paged attention of one row per request.

use kvweave_core::ops::{AttendDecode, AttendPrefill, Element, OpError};

use crate::attend_prefill;

/// See [`AttendDecode`]: by definition `attend_prefill` with one row per request.
///
/// # Errors
/// What [`AttendDecode::validate`] refuses.
pub fn attend_decode<T: Element, C: Element>(
    params: AttendDecode<'_, T, C>,
) -> Result<(), OpError> {
    params.validate()?;
    let AttendDecode { queries, kv, scoring, entry_offsets, out, lse } = params;
    let row_offsets: Vec<i32> = (0..).take(queries.vectors.rows + 1).collect();
    let row_offsets = &row_offsets;
    attend_prefill(AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse })
}
