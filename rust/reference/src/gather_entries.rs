//! Selected pages as tables of their own.

use kvweave_core::ops::{GatherEntries, NO_ENTRY, OpError};

/// See [`GatherEntries`]. Each entry is copied once: the CPU's version too.
///
/// # Errors
/// What [`GatherEntries::validate`] refuses.
pub fn gather_entries(params: GatherEntries<'_>) -> Result<(), OpError> {
    params.validate()?;
    let (most, heads, tables) = (params.most, params.heads, params.tables());
    let lists: Vec<usize> = (0..heads).map(|head| params.table(head)).collect();
    let GatherEntries { pages, selected, entries, entry_offsets, gathered, offsets, .. } = params;
    for (row, &selected) in selected.iter().enumerate() {
        let base = entry_offsets[row / heads * tables + lists[row % heads]] as usize;
        let (begin, count) = (row * most, selected as usize);
        for i in 0..most {
            let found = || entries[base + pages[begin + i] as usize];
            gathered[begin + i] = if i < count { found() } else { NO_ENTRY };
        }
        offsets[2 * row] = begin as i32;
        offsets[2 * row + 1] = (begin + count) as i32;
    }
    offsets[2 * selected.len()] = (selected.len() * most) as i32;
    Ok(())
}
