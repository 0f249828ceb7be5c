//! Paged attention of rows at arbitrary positions.

use kvweave_core::ops::{AttendPrefill, Element, OpError};

use crate::attention::{attend_row, visible_keys};

/// See [`AttendPrefill`].
///
/// # Errors
/// What [`AttendPrefill::validate`] refuses.
pub fn attend_prefill<T: Element, C: Element>(
    params: AttendPrefill<'_, T, C>,
) -> Result<(), OpError> {
    params.validate()?;
    let AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse } = params;
    let heads = queries.vectors.heads;
    let group = heads / kv.geometry.kv_heads;
    let dim = kv.geometry.head_dim;
    for (request, rows) in row_offsets.windows(2).enumerate() {
        for row in rows[0] as usize..rows[1] as usize {
            let position = queries.positions[row];
            for head in 0..heads {
                let q = queries.vectors.vector(row, head);
                let reach = kv.head(head / group, &scoring);
                let entries = &kv.entries[kv.span(entry_offsets, request, reach.table)];
                let seen = reach.visible(position);
                let keys = visible_keys(q, &seen, &kv, entries, head / group, &scoring);
                let state = row * heads + head;
                lse[state] = attend_row(&keys, &kv, &mut out[state * dim..(state + 1) * dim]);
            }
        }
    }
    Ok(())
}
