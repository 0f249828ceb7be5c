//! Knowledge bases: insert, list, delete, share of the arena, shrink, growth, and bad requests.

use kvweave_core::{
    Admission, CacheConfig, ErrorKind, KvCache, KvDtype, KvShape, MarkedSegment, Outcome, Request,
    SegmentSource,
};

fn cache(blocks: u64) -> KvCache {
    let shape = KvShape::new(2, 1, 8, 4, KvDtype::F32).unwrap();
    KvCache::new(CacheConfig::new(shape, 0).sized_for(blocks).unwrap()).unwrap()
}

fn text(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

fn admitted(cache: &KvCache, tokens: &[u32]) -> Request {
    let mut request = cache.admit(&Admission::new(tokens)).unwrap();
    request.take_copies();
    request.finish_copies();
    request.commit(tokens.len(), tokens.len()).unwrap();
    request
}

fn insert(cache: &KvCache, name: &str, tokens: &[u32]) {
    admitted(cache, tokens).freeze(name, 0..tokens.len()).unwrap();
    cache.check().unwrap();
}

fn resident(cache: &KvCache) -> Vec<usize> {
    cache.frozen(None).iter().map(|segment| segment.resident_blocks).collect()
}

#[test]
fn a_frozen_segment_outlives_pressure_that_evicts_the_rest() {
    let cache = cache(20);
    insert(&cache, "book", &text(100, 11));
    drop(admitted(&cache, &text(900, 8)));
    for round in 0..10 {
        drop(admitted(&cache, &text(1000 + 100 * round, 48)));
        cache.check().unwrap();
    }
    assert_eq!(cache.lookup_prefix(&text(900, 8), ""), 0);
    let mut tokens = text(5000, 3);
    tokens.extend(text(100, 11));
    tokens.push(1);
    let marked = [MarkedSegment { start: 3, end: 14, namespace: "" }];
    let request = cache.admit(&Admission { marked: &marked, ..Admission::new(&tokens) }).unwrap();
    let source = SegmentSource::Frozen("book".into());
    let expected = Outcome::Segment { delta: 3, source, exact: true, own: true };
    assert_eq!(request.plan().spans[1].outcome, expected);
    assert_eq!(request.plan().segment_tokens(), 11);
    let listed = cache.frozen(Some(""));
    assert_eq!((listed[0].tokens, listed[0].blocks, listed[0].references), (11, 3, 3));
    assert!(cache.frozen(Some("elsewhere")).is_empty());
}

#[test]
fn deleting_gives_the_blocks_back() {
    let cache = cache(20);
    insert(&cache, "a", &text(100, 8));
    insert(&cache, "b", &text(100, 8));
    assert_eq!(cache.stats().frozen_blocks, 2, "equal content is stored once");
    cache.delete_frozen("a", "").unwrap();
    assert_eq!(cache.stats().frozen_blocks, 2);
    cache.delete_frozen("b", "").unwrap();
    let group = cache.stats().groups[0];
    assert_eq!((group.frozen, group.held, group.cached), (0, 0, 2));
    let error = cache.delete_frozen("b", "").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownSegment);
    insert(&cache, "c", &text(200, 8));
    insert(&cache, "c", &text(300, 4));
    assert_eq!(resident(&cache), [1], "an entry of the same name is replaced");
    cache.check().unwrap();
}

#[test]
fn the_frozen_share_is_a_limit() {
    let cache = cache(20);
    insert(&cache, "a", &text(100, 32));
    let mut request = admitted(&cache, &text(500, 12));
    let before = cache.stats();
    let error = request.freeze("b", 0..12).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolFull { needed: 3, free: 2 });
    assert_eq!(cache.stats(), before);
    request.freeze("b", 0..8).unwrap();
    cache.check().unwrap();
}

#[test]
fn what_cannot_fit_takes_nothing_from_the_frozen() {
    let cache = cache(20);
    insert(&cache, "book", &text(100, 16));
    let held = admitted(&cache, &text(1000, 20));
    let before = cache.stats();
    for tokens in [61, 81, 4000] {
        let error = cache.admit(&Admission::new(&text(5000, tokens))).err().unwrap();
        assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }));
        assert_eq!(cache.stats(), before);
        cache.check().unwrap();
    }
    // Fifteen blocks are left besides the held five: the book yields to who needs them all.
    drop(admitted(&cache, &text(6000, 60)));
    assert_eq!(resident(&cache), [0]);
    drop(held);
}

#[test]
fn the_least_referenced_blocks_yield_above_the_watermark_and_come_back() {
    let cache = cache(20);
    insert(&cache, "cold", &text(100, 16));
    insert(&cache, "warm", &text(200, 16));
    for _ in 0..3 {
        let mut tokens = text(200, 16);
        tokens.push(7);
        drop(cache.admit(&Admission::new(&tokens)).unwrap());
    }
    assert_eq!(resident(&cache), [4, 4]);
    // 8 frozen + 12 would be 100 % of 20 blocks: 2 frozen blocks must go.
    let busy = admitted(&cache, &text(1000, 48));
    cache.check().unwrap();
    assert_eq!(resident(&cache), [2, 4]);
    assert_eq!(cache.stats().frozen_absent, 2);
    drop(busy);
    cache.rebalance();
    cache.check().unwrap();
    assert_eq!(resident(&cache), [4, 4], "what was not evicted comes back");
    // Now they are evicted before utilisation falls, and come back with the text.
    let busy = admitted(&cache, &text(2000, 60));
    drop(admitted(&cache, &text(3000, 4)));
    drop(busy);
    cache.rebalance();
    let left = resident(&cache);
    assert!(left[0] < 4, "{left:?}");
    drop(admitted(&cache, &text(100, 16)));
    cache.rebalance();
    assert_eq!(resident(&cache)[0], 4);
    cache.check().unwrap();
}

#[test]
fn blocks_that_are_read_do_not_yield() {
    let cache = cache(20);
    insert(&cache, "read", &text(100, 16));
    let mut tokens = text(100, 16);
    tokens.push(7);
    let reader = cache.admit(&Admission::new(&tokens)).unwrap();
    let error = cache.admit(&Admission::new(&text(1000, 64))).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::PoolFull { needed: 16, free: 15 });
    assert_eq!(resident(&cache), [4]);
    drop(reader);
    cache.check().unwrap();
}

#[test]
fn malformed_requests_are_refused_and_change_nothing() {
    let cache = cache(20);
    let tokens = text(100, 12);
    let mark = |start, end, namespace| MarkedSegment { start, end, namespace };
    let before = cache.stats();
    let overlapping = [mark(0, 8, "a"), mark(4, 12, "a")];
    let contested = [mark(0, 8, "a"), mark(0, 8, "b")];
    let long = [mark(4, 13, "a")];
    let empty = [mark(4, 4, "a")];
    for (tokens, marked, kind) in [
        (&tokens[..0], &[][..], ErrorKind::InvalidArgument),
        (&tokens, &overlapping, ErrorKind::InvalidArgument),
        (&tokens, &contested, ErrorKind::NamespaceConflict),
        (&tokens, &long, ErrorKind::OutOfRange),
        (&tokens, &empty, ErrorKind::OutOfRange),
    ] {
        let error = cache.admit(&Admission { marked, ..Admission::new(tokens) }).err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
    }
    let huge = Admission { reserve_tokens: usize::MAX, ..Admission::new(&tokens) };
    assert_eq!(cache.admit(&huge).err().unwrap().kind(), ErrorKind::InvalidArgument);
    assert_eq!(cache.stats(), before);
}

#[test]
fn requests_refuse_what_they_cannot_do() {
    let cache = cache(20);
    let mut request = cache.admit(&Admission::new(&text(100, 10))).unwrap();
    assert_eq!(request.slots(&[10]).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(request.slots(&[-1]).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(request.commit(11, 0).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(request.commit(5, 6).unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(request.freeze("x", 0..4).unwrap_err().kind(), ErrorKind::OutOfRange);
    request.commit(10, 10).unwrap();
    assert_eq!(request.slots(&[3]).unwrap_err().kind(), ErrorKind::NotWritable);
    assert_eq!(request.make_writable(&[3], None).unwrap_err().kind(), ErrorKind::NotWritable);
    let mut longer = text(100, 9);
    longer.extend(text(700, 3));
    let mut second = cache.admit(&Admission::new(&longer)).unwrap();
    assert_eq!(second.slots(&[1]).unwrap_err().kind(), ErrorKind::NotWritable);
    assert_eq!(second.commit(12, 12).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(second.fork().err().unwrap().kind(), ErrorKind::InvalidArgument);
    assert_eq!(
        second.append(&text(0, 400)).unwrap_err().kind(),
        ErrorKind::PoolFull { needed: 100, free: 16 }
    );
    assert_eq!(second.len(), 12);
    cache.check().unwrap();
}
