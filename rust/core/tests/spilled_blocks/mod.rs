//! Spills blocks of requests on a simulated arena, where pages below 0 are the host's, and brings
//! them back.

use std::collections::HashMap;

use kvweave_core::{ErrorKind, GroupId, KvCache, Request};

use crate::simulated_arena::Arena;

/// The last head group that keeps every token.
fn whole_group(cache: &KvCache) -> Option<GroupId> {
    let mut groups = (0..cache.groups().len() as u8).map(GroupId).rev();
    groups.find(|&group| cache.groups().window(group).is_none())
}

/// Whether any of a request lies in the host's memory.
pub fn is_spilled(request: &Request) -> bool {
    let mut groups = (0..request.tables() - request.promoted().len()).map(|g| GroupId(g as u8));
    groups.any(|group| request.spilled(group).unwrap() > 0)
}

/// The slots of a block's pages.
fn slots_of(cache: &KvCache, group: GroupId, block: i32) -> impl Iterator<Item = (i32, i32)> {
    let (pages, slots) =
        (cache.groups().pages()[group.index()] as i32, cache.config().shape.page_tokens() as i32);
    (block..block + pages).flat_map(move |page| (0..slots).map(move |slot| (page, slot)))
}

/// Carries a block to other pages.
fn carry(cache: &KvCache, arena: &mut Arena, group: GroupId, (from, to): (i32, i32)) {
    for (here, there) in slots_of(cache, group, from).zip(slots_of(cache, group, to)) {
        match arena.cells.get(&here).copied() {
            Some(cell) => arena.cells.insert(there, cell),
            None => arena.cells.remove(&there),
        };
    }
}

/// Writes what is nobody's token into a block.
fn spoil(cache: &KvCache, arena: &mut Arena, group: GroupId, block: i32) {
    for slot in slots_of(cache, group, block) {
        arena.cells.insert(slot, (u32::MAX, -1, (u32::MAX, 0)));
    }
}

/// Spills the blocks of so many entries, for so many slots at least, whose content is nobody's from
/// then on. `home`: the first block of the host's memory that was never given.
pub fn spill(
    cache: &KvCache,
    arena: &mut Arena,
    request: &mut Request,
    home: &mut i32,
    (entries, slots): (usize, usize),
) {
    let Some(group) = whole_group(cache) else { return };
    let (first, page) =
        (request.spilled(group).unwrap(), cache.config().shape.page_tokens() as i32);
    let table = request.entries_of(usize::from(group.0)).unwrap();
    let before = (request.len() as i32 - 1) / page * page;
    let may = |entry: &&[i32; 5]| entry[3] + entry[2] - entry[1] <= before;
    let going: Vec<[i32; 5]> =
        table[first..].iter().take_while(may).take(entries).copied().collect();
    // A block has up to eight pages, of which the last has the lowest number. Entries of one block
    // have one number.
    let mut of_page = HashMap::new();
    let numbers: Vec<i32> = going
        .iter()
        .map(|entry| {
            *of_page.entry(entry[0]).or_insert_with(|| {
                *home += 8;
                *home - 1
            })
        })
        .collect();
    let stats = cache.stats();
    match request.spill(group, &numbers, slots) {
        Ok(pages) => {
            assert!(pages.len() >= slots);
            for (entry, &number) in going.iter().zip(&numbers) {
                carry(cache, arena, group, (entry[0], -1 - number));
            }
            pages.iter().for_each(|&page| spoil(cache, arena, group, page));
        }
        Err(error) => {
            let full = matches!(error.kind(), ErrorKind::PoolFull { .. });
            assert!(full || error.kind() == ErrorKind::InvalidArgument, "{error}");
            assert_eq!(request.entries_of(usize::from(group.0)).unwrap(), table);
            assert_eq!(cache.stats(), stats, "a refused spill changed something");
        }
    }
}

/// Brings back all that was spilled, if there is room.
pub fn bring_back(cache: &KvCache, arena: &mut Arena, request: &mut Request) {
    let Some(group) = whole_group(cache) else { return };
    let table = usize::from(group.0);
    let (before, count) = (request.entries_of(table).unwrap(), request.spilled(group).unwrap());
    let outcome = request.bring_back(group);
    let after = request.entries_of(table).unwrap();
    if let Err(error) = outcome {
        assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}");
        assert_eq!(before, after);
        return;
    }
    assert!(!is_spilled(request));
    for (from, to) in before.iter().zip(&after).take(count) {
        carry(cache, arena, group, (from[0], to[0]));
    }
}
