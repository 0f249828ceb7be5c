//! An engine's description of a batch as tables of our ops.

use kvweave_core::ops::{OpError, StepTables};

/// See [`StepTables`]. Whole numbers in one pass over what is listed: the CPU's version too.
///
/// # Errors
/// What [`StepTables::validate`] refuses.
pub fn step_tables(params: StepTables<'_>) -> Result<(), OpError> {
    params.validate()?;
    let StepTables { shape, blocks, lengths, query_start, places, .. } = params;
    let StepTables { positions, slots, entries, offsets, .. } = params;
    let page_tokens = shape.page_tokens as i64;
    let tables = shape.spans.len();
    // The block of a page in a table: 0 where it is nowhere, −1 where there can be none.
    let block_of = |table: usize, page: i64| match (places, shape.places) {
        (Some(places), Some(pages)) => {
            let known = usize::try_from(page).ok().filter(|&page| page < pages);
            known.map_or(0, |page| places[table * pages + page].max(0))
        }
        _ => i32::try_from(page.saturating_mul(shape.block_pages as i64)).unwrap_or(-1).max(-1),
    };

    let mut listed = 0;
    offsets[0] = 0;
    for request in 0..shape.requests {
        let length = i64::from(lengths[request]);
        let computed = i64::from(query_start[request + 1]) - i64::from(query_start[request]);
        for (table, span) in shape.spans.iter().enumerate() {
            let seen = span.listed((length, computed), page_tokens, shape.columns as i64);
            for index in seen.pages() {
                let page = i64::from(blocks[request * params.block_stride + index as usize]);
                let position = index * page_tokens;
                let end = (length - position).min(page_tokens);
                entries[listed] = [block_of(table, page), 0, end as i32, position as i32, 0];
                listed += 1;
            }
            offsets[request * tables + table + 1] = listed as i32;
        }
    }

    for (row, &place) in params.slot_mapping.iter().enumerate() {
        let behind = query_start[1..].partition_point(|&end| end as usize <= row);
        let request = behind.min(shape.requests - 1);
        let position =
            row as i64 + i64::from(lengths[request]) - i64::from(query_start[request + 1]);
        positions[row] = position.clamp(0, i64::from(i32::MAX)) as i32;
        for table in 0..tables {
            let block = if place < 0 { -1 } else { block_of(table, place / page_tokens) };
            let nowhere = block < 0 || (block == 0 && shape.places.is_some());
            slots[table * shape.rows + row] =
                if nowhere { [-1, -1] } else { [block, (place % page_tokens) as i32] };
        }
    }
    Ok(())
}
