//! What head groups save, what windows let go of, and that it serves others at once.

use proptest::prelude::*;

use kvweave_core::{
    Admission, CacheConfig, ErrorKind, GroupId, HeadClass, HeadClassMap, KvCache, KvDtype, KvShape,
    MarkedSegment, Mode, Request, Reuse,
};

const P: usize = 16;

/// A cache in which every `one_in`-th head is full and the others keep a window.
fn cache_of(shape: KvShape, blocks: u64, one_in: usize, sink: u32, recent: u32) -> KvCache {
    let mut map = HeadClassMap::full(&shape, "m");
    for (i, entry) in map.heads.iter_mut().enumerate() {
        if i % one_in != 0 {
            entry.class = HeadClass::Window { sink, recent };
        }
    }
    let mut config = CacheConfig::new(shape, 0).sized_for(blocks).unwrap();
    config.heads = Some(map);
    KvCache::new(config).unwrap()
}

/// Eight heads of which one is full: two groups.
fn small(blocks: u64) -> KvCache {
    cache_of(KvShape::new(2, 4, 8, 16, KvDtype::F32).unwrap(), blocks, 8, 4, 32)
}

fn text(from: u32, count: usize) -> Vec<u32> {
    (from..from + count as u32).collect()
}

/// Prefills a prompt chunk by chunk; `commits` after each of them.
fn prefill(request: &mut Request, chunk: usize, commits: bool) {
    let total = request.len();
    let first = request.plan().prefix_tokens();
    let mut at = first;
    while at < total {
        let end = total.min(at + chunk);
        request.advance(at, end).unwrap();
        settle(request);
        if commits {
            request.commit(end, end).unwrap();
        }
        at = end;
    }
    request.advance(total, total).unwrap();
    settle(request);
}

fn settle(request: &mut Request) {
    for group in 0..request.tables() - request.promoted().len() {
        request.take_copies_of(GroupId(group as u8)).unwrap();
    }
    request.finish_copies();
}

/// Requests of 32K tokens that a cache takes one after the other, all of them kept.
fn admitted(cache: &KvCache, chunk: usize, commits: bool) -> usize {
    const TOKENS: usize = 32 * 1024;
    let mut kept = Vec::new();
    loop {
        let tokens = text(kept.len() as u32 * TOKENS as u32, TOKENS);
        let admission =
            Admission { chunk_tokens: chunk, reuse: Reuse::None, ..Admission::new(&tokens) };
        match cache.admit(&admission) {
            Ok(mut request) => {
                prefill(&mut request, if chunk == 0 { TOKENS } else { chunk }, commits);
                kept.push(request);
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}");
                cache.check().unwrap();
                return kept.len();
            }
        }
    }
}

fn seven_times_as_many(layers: u32, requests: u64) {
    let shape = KvShape::new(layers, 8, 128, P as u32, KvDtype::Bf16).unwrap();
    let blocks = requests * 32 * 1024 / P as u64;
    let dense = KvCache::new(CacheConfig::new(shape, 0).sized_for(blocks).unwrap());
    let dense = admitted(&dense.unwrap(), 0, false);
    assert_eq!(dense as u64, requests);
    for commits in [false, true] {
        let grouped = admitted(&cache_of(shape, blocks, 8, 16, 256), 2048, commits);
        assert!(grouped >= 7 * dense, "{grouped} requests beside {dense} dense ones");
    }
}

#[test]
fn windows_of_seven_heads_in_eight_admit_seven_times_as_many() {
    seven_times_as_many(64, 4);
    seven_times_as_many(80, 4);
    seven_times_as_many(80, 8);
}

/// A prompt of 160 tokens that leaves its blocks in the cache.
fn served(cache: &KvCache, chunk: usize, commits: bool) -> Vec<u32> {
    let tokens = text(1000, 160);
    let mut request =
        cache.admit(&Admission { chunk_tokens: chunk, ..Admission::new(&tokens) }).unwrap();
    prefill(&mut request, 32, commits);
    request.commit(160, 160).unwrap();
    cache.check().unwrap();
    tokens
}

fn positions(entries: &[[i32; 5]]) -> Vec<i32> {
    entries.iter().map(|entry| entry[3]).collect()
}

#[test]
fn a_prefix_ends_where_window_groups_still_store_what_a_row_sees() {
    let cache = small(100);
    let tokens = served(&cache, 32, false);
    assert_eq!(cache.lookup_prefix(&tokens, ""), 160);
    // Of the middle nothing is left but the full head; of the beginning, the sink's block.
    for (end, found) in [(10, 10), (16, 16), (17, 16), (100, 16), (159, 159)] {
        assert_eq!(cache.lookup_prefix(&tokens[..end], ""), found, "of {end} tokens");
    }
    let mut longer = tokens.clone();
    longer.extend(text(5000, 20));
    let request = cache.admit(&Admission::new(&longer)).unwrap();
    assert_eq!(request.plan().prefix_tokens(), 160);
    assert_eq!(positions(&request.entries_of(0).unwrap()).len(), 12);
    assert_eq!(positions(&request.entries_of(1).unwrap()), [0, 128, 144, 160, 176]);
}

#[test]
fn what_is_committed_stays_findable_after_it_was_let_go() {
    let cache = small(100);
    let tokens = served(&cache, 32, true);
    for end in [10, 16, 17, 100, 159, 160] {
        assert_eq!(cache.lookup_prefix(&tokens[..end], ""), end);
    }
    assert_eq!(cache.stats().groups[1].cached, 10);
}

#[test]
fn blocks_that_were_lost_are_filled_in_by_who_computes_them_again() {
    let cache = small(100);
    let tokens = served(&cache, 32, false);
    assert_eq!(cache.lookup_prefix(&tokens[..100], ""), 16);
    let cached = cache.stats().groups[0].cached;
    let mut other = tokens[..100].to_vec();
    other.extend(text(7000, 12));
    let mut request = cache.admit(&Admission::new(&other)).unwrap();
    settle(&mut request);
    request.commit(112, 112).unwrap();
    drop(request);
    cache.check().unwrap();
    assert_eq!(cache.lookup_prefix(&tokens[..96], ""), 96);
    assert_eq!(cache.stats().groups[0].cached, cached + 1, "only the last block is new");
}

#[test]
fn segments_are_taken_only_where_every_group_has_them() {
    for (commits, reused) in [(false, 0), (true, 160)] {
        let cache = small(100);
        let segment = served(&cache, 32, commits);
        let mut tokens = text(9000, 5);
        tokens.extend(&segment);
        tokens.extend(text(8000, 3));
        let marked = [MarkedSegment { start: 5, end: 165, namespace: "" }];
        let request =
            cache.admit(&Admission { marked: &marked, ..Admission::new(&tokens) }).unwrap();
        // The sink's block and the last two are whole in both cases.
        assert_eq!(request.plan().segment_tokens(), if commits { reused } else { 48 });
    }
}

#[test]
fn a_prompt_in_chunks_goes_on_in_a_full_arena() {
    let cache = small(40);
    let tokens = text(1000, 320);
    let admission = Admission { chunk_tokens: 32, ..Admission::new(&tokens) };
    let mut request = cache.admit(&admission).unwrap();
    let mut others = Vec::new();
    loop {
        let tokens = text(50_000 + 100 * others.len() as u32, 40);
        match cache.admit(&Admission::new(&tokens)) {
            Ok(other) => others.push(other),
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }));
                break;
            }
        }
    }
    prefill(&mut request, 32, true);
    cache.check().unwrap();
    assert_eq!(positions(&request.entries_of(1).unwrap()), [0, 288, 304]);
    // What the end of the prefill has let go of serves others.
    assert!(cache.admit(&Admission::new(&text(90_000, 16))).is_ok());
}

#[test]
fn a_block_that_chunks_kept_from_others_is_anybodys_once_it_is_free() {
    let cache = small(60);
    let tokens = text(1000, 320);
    let admission = Admission { chunk_tokens: 32, reuse: Reuse::None, ..Admission::new(&tokens) };
    // Of the second the cache has everything already: its blocks are entered nowhere.
    for _ in 0..2 {
        let mut request = cache.admit(&admission).unwrap();
        prefill(&mut request, 32, true);
        cache.check().unwrap();
        drop(request);
        cache.check().unwrap();
    }
    let mut others = Vec::new();
    loop {
        let other = text(50_000 + 100 * others.len() as u32, 40);
        let Ok(mut request) = cache.admit(&Admission::new(&other)) else { break };
        settle(&mut request);
        request.commit(40, 40).unwrap();
        others.push(request);
    }
    assert!(others.len() > 10, "{}", others.len());
    for (number, mut request) in (0..).zip(others) {
        if number < 6 {
            request.freeze(&format!("book {number}"), 0..40).unwrap();
        }
        drop(request);
        assert_eq!(cache.lookup_prefix(&text(50_000 + 100 * number, 41), ""), 40);
    }
    cache.check().unwrap();
}

#[test]
fn a_slab_that_a_window_has_left_serves_full_heads() {
    let shape = KvShape::new(2, 4, 8, 16, KvDtype::F32).unwrap();
    let cache = cache_of(shape, 64, 8, 4, 32);
    let long = text(1000, 60 * 16);
    let mut request = cache.admit(&Admission::new(&long)).unwrap();
    let next = Admission { chunk_tokens: 16, ..Admission::new(&long) };
    let next = Admission { reuse: Reuse::None, ..next };
    let full = cache.admit(&next).err().unwrap();
    assert!(matches!(full.kind(), ErrorKind::PoolFull { .. }), "{full}");
    request.advance(long.len(), long.len()).unwrap();
    let others: Vec<Request> = (0..4).map(|_| cache.admit(&next).unwrap()).collect();
    cache.check().unwrap();
    let own = |request: &Request| request.kv_bytes().0;
    assert!(6 * own(&request) < 64 * 8 * cache.config().shape.page_bytes());
    drop(others);
}

#[test]
fn a_promoted_head_has_a_table_of_its_own() {
    let cache = small(100);
    let tokens = text(1000, 40);
    let mut request =
        cache.admit(&Admission { reserve_tokens: 20, ..Admission::new(&tokens) }).unwrap();
    let (own, _) = request.kv_bytes();
    let copies = request.promote(1, 2).unwrap();
    assert_eq!(copies.iter().map(|copy| copy[4]).sum::<i32>(), 40);
    let [_, rank, ..] = cache.groups().head_rows(1).unwrap()[2];
    let blocks = request.entries_of(1).unwrap();
    assert!(copies.iter().zip(&blocks).all(|(copy, entry)| copy[0] == entry[0] + rank));
    assert_eq!(request.head_rows(1).unwrap()[2], [2, 0, 0, 0]);
    assert_eq!(request.head_rows(0).unwrap(), cache.groups().head_rows(0).unwrap());
    assert_eq!((request.tables(), request.promoted()), (3, &[(1, 2)][..]));
    assert_eq!(request.kv_bytes().0, own + 4 * cache.config().shape.page_bytes());
    request.append(&text(2000, 90)).unwrap();
    assert_eq!(positions(&request.entries_of(2).unwrap()).len(), 9);
    assert_eq!(request.slots_of(2, &[129]).unwrap()[0][1], 1);
    assert_eq!(request.fork().err().unwrap().kind(), ErrorKind::InvalidArgument);
    // Its group has not stored the head since, so only what stood before may be found.
    request.commit(130, 130).unwrap();
    drop(request);
    cache.check().unwrap();
    assert_eq!(cache.lookup_prefix(&text(1000, 40), ""), 0);
    assert!(cache.stats().groups.iter().all(|group| group.held == 0));
}

#[test]
fn promotions_that_cannot_be() {
    let cache = small(12);
    let tokens = text(1000, 40);
    let mut request = cache.admit(&Admission::new(&tokens)).unwrap();
    let refused = |request: &mut Request, layer, head, kind| {
        let (tables, bytes) = (request.tables(), request.kv_bytes());
        let error = request.promote(layer, head).unwrap_err();
        assert_eq!(std::mem::discriminant(&error.kind()), std::mem::discriminant(&kind), "{error}");
        assert_eq!((request.tables(), request.kv_bytes()), (tables, bytes));
        cache.check().unwrap();
    };
    refused(&mut request, 2, 0, ErrorKind::OutOfRange);
    refused(&mut request, 0, 4, ErrorKind::OutOfRange);
    refused(&mut request, 0, 0, ErrorKind::InvalidArgument);
    request.promote(0, 1).unwrap();
    refused(&mut request, 0, 1, ErrorKind::InvalidArgument);
    let mut others = Vec::new();
    while let Ok(other) = cache.admit(&Admission::new(&text(5000, 16))) {
        others.push(other);
    }
    let mut full = 2;
    while full < 8 && request.promote(full / 4, full % 4).is_ok() {
        full += 1;
    }
    refused(&mut request, 1, 3, ErrorKind::PoolFull { needed: 0, free: 0 });
    drop(others);
    request.append(&text(3000, 40)).unwrap();
    request.append(&text(3000, 1)).unwrap();
    refused(&mut request, 1, 3, ErrorKind::InvalidArgument);
}

#[test]
fn ranges_that_cannot_come_next() {
    let cache = small(40);
    let tokens = text(1000, 100);
    let admission = Admission { chunk_tokens: 32, ..Admission::new(&tokens) };
    let mut request = cache.admit(&admission).unwrap();
    request.advance(32, 64).unwrap();
    for (start, end) in [(31, 64), (50, 49), (64, 101)] {
        assert_eq!(request.advance(start, end).unwrap_err().kind(), ErrorKind::OutOfRange);
    }
    assert_eq!(request.fork().err().unwrap().kind(), ErrorKind::InvalidArgument);
    assert_eq!(request.slots_of(1, &[99, 63]).unwrap()[0], [-1, -1]);
    assert!(request.slots_of(1, &[63]).unwrap()[0][0] > 0);
    assert_eq!(request.slots_of(2, &[0]).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(request.entries_of(2).unwrap_err().kind(), ErrorKind::OutOfRange);
    let nowhere = request.make_writable(&[64], Some(GroupId(2))).unwrap_err();
    assert_eq!(nowhere.kind(), ErrorKind::OutOfRange);
    request.commit(64, 64).unwrap();
    assert_eq!(request.freeze("x", 0..64).unwrap_err().kind(), ErrorKind::InvalidArgument);
    // Far beyond what was reckoned with, where there is no room.
    let long = text(1000, 40 * 16);
    let admission = Admission { chunk_tokens: 16, reuse: Reuse::None, ..Admission::new(&long) };
    drop(request);
    let mut request = cache.admit(&admission).unwrap();
    let mut kept = Vec::new();
    while let Ok(other) = cache.admit(&Admission::new(&text(9000, 40))) {
        kept.push(other);
    }
    let before = request.entries_of(1).unwrap();
    let error = request.advance(0, 640).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}");
    assert_eq!(request.entries_of(1).unwrap(), before);
    cache.check().unwrap();
    prefill(&mut request, 16, false);
}

#[test]
fn donors_are_read_by_window_groups_while_the_full_one_writes() {
    let cache = small(100);
    let segment = text(1000, 64);
    let mut donor = cache.admit(&Admission::new(&segment)).unwrap();
    donor.commit(64, 64).unwrap();
    drop(donor);
    let mut tokens = text(9000, 16);
    tokens.extend(&segment);
    tokens.push(1);
    let marked = [MarkedSegment { start: 16, end: 80, namespace: "" }];
    let admission = Admission { marked: &marked, mode: Mode::Share, ..Admission::new(&tokens) };
    let mut request = cache.admit(&admission).unwrap();
    request.make_writable(&[20, 70], Some(GroupId(0))).unwrap();
    assert_eq!(request.take_copies_of(GroupId(0)).unwrap().len(), 2);
    assert!(request.take_copies_of(GroupId(1)).unwrap().is_empty());
    assert!(request.slots_of(0, &[20]).is_ok());
    assert_eq!(request.slots_of(1, &[20]).unwrap_err().kind(), ErrorKind::NotWritable);
    let delta = |table: usize| request.entries_of(table).unwrap()[1][4];
    assert_eq!((delta(0), delta(1)), (0, 16));
    // Donors that no coming row sees are let go of, one group for itself.
    let held = |group: usize| cache.stats().groups[group].held;
    let before = (held(0), held(1));
    request.advance(81, 81).unwrap();
    assert_eq!(held(0), before.0);
    assert!(held(1) < before.1);
    cache.check().unwrap();
}

#[test]
fn maps_that_do_not_suit_a_cache() {
    let shape = KvShape::new(2, 4, 8, 16, KvDtype::F32).unwrap();
    let mut config = CacheConfig::new(shape, 0).sized_for(20).unwrap();
    let mut narrow = HeadClassMap::full(&shape, "m");
    narrow.heads[3].class = HeadClass::Window { sink: 4, recent: 15 };
    let mut fewer = HeadClassMap::full(&shape, "m");
    fewer.heads.pop();
    let mut later = HeadClassMap::full(&shape, "m");
    later.schema_version = 2;
    let other = HeadClassMap::full(&KvShape::new(4, 2, 8, 16, KvDtype::F32).unwrap(), "m");
    for (map, word) in
        [(narrow, "at least a page"), (fewer, "entries"), (later, "schema"), (other, "layers")]
    {
        config.heads = Some(map);
        let error = KvCache::new(config.clone()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::CorruptHeadMap);
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn an_arena_sized_for_one_group_has_a_block_more_than_was_asked_for() {
    let shape = KvShape::new(30, 3, 64, 16, KvDtype::F32).unwrap();
    let config = CacheConfig::new(shape, 0);
    assert_eq!(config.clone().sized_for(10).unwrap().arena_pages, 11 * 90);
    for blocks in [u64::MAX, u64::MAX / 90, 1 << 26] {
        let refused = config.clone().sized_for(blocks).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }
}

proptest! {
    #[test]
    fn an_arena_sized_for_a_prompt_takes_it_whatever_the_heads(
        layers in 1_u32..40,
        heads in 1_u32..5,
        local in prop::collection::vec(any::<bool>(), 160),
        blocks in 1_usize..400,
    ) {
        let shape = KvShape::new(layers, heads, 8, 16, KvDtype::F32).unwrap();
        let mut map = HeadClassMap::full(&shape, "m");
        for (entry, local) in map.heads.iter_mut().zip(local) {
            if local {
                entry.class = HeadClass::Window { sink: 4, recent: 32 };
            }
        }
        let whole = u64::from(layers * heads) * (blocks as u64 + 1);
        let config = CacheConfig { heads: Some(map), ..CacheConfig::new(shape, 0) };
        let config = config.sized_for(blocks as u64).unwrap();
        // Slabs cost two blocks of all heads and a third, at the worst: in small arenas.
        let pages = config.arena_pages;
        let most = whole + whole / 3 + 2 * u64::from(layers * heads);
        prop_assert!(pages <= most, "{pages} pages for {whole}");
        let cache = KvCache::new(config).unwrap();
        let tokens = text(0, 16 * blocks);
        let request = cache.admit(&Admission::new(&tokens)).unwrap();
        cache.check().unwrap();
        drop(request);
    }
}
