//! Namespaces are known for as long as anything is of them, and a refused call makes none.

use std::collections::BTreeSet;

use kvweave_core::{
    Admission, CacheConfig, ErrorKind, KvCache, KvDtype, KvShape, MarkedSegment, Reuse,
};
use proptest::prelude::*;

const PAGE: usize = 4;

fn cache(blocks: u64) -> KvCache {
    let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
    KvCache::new(CacheConfig::new(shape, 0).sized_for(blocks).unwrap()).unwrap()
}

fn text(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

fn learn(cache: &KvCache, tokens: &[u32], namespace: &str, regime: u64) {
    let admission = Admission { namespace, regime, ..Admission::new(tokens) };
    let mut request = cache.admit(&admission).unwrap();
    request.take_copies();
    request.finish_copies();
    request.commit(tokens.len(), tokens.len()).unwrap();
}

#[test]
fn a_refused_admission_leaves_nothing_behind() {
    let cache = cache(10);
    learn(&cache, &text(0, 8), "known", 0);
    let before = cache.stats();
    assert_eq!(before.namespaces, 1);
    let tokens = text(100, 100);
    for round in 0..200 {
        let (namespace, marked) = (format!("a{round}"), format!("b{round}"));
        let marked = [MarkedSegment { start: 3, end: 40, namespace: &marked }];
        for regime in 0..3 {
            let marked = &marked;
            let admission =
                Admission { namespace: &namespace, marked, regime, ..Admission::new(&tokens) };
            let error = cache.admit(&admission).err().unwrap();
            assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }));
        }
        assert_eq!(cache.stats(), before);
    }
    cache.check().unwrap();
}

/// With a dynamic RoPE every length is a regime of its own.
#[test]
fn no_more_namespaces_are_known_than_blocks_and_requests() {
    let cache = cache(10);
    for regime in 0..2000 {
        learn(&cache, &text(0, 9), "", regime);
        assert!(cache.stats().namespaces <= 10);
    }
    assert_eq!(cache.lookup_prefix_in(&text(0, 9), "", 1999), 9);
    assert_eq!(cache.lookup_prefix_in(&text(0, 9), "", 0), 0);
    cache.check().unwrap();
}

#[test]
fn a_request_its_forks_and_documents_keep_a_namespace() {
    let cache = cache(20);
    let known = || cache.stats().namespaces;
    let marked = [MarkedSegment { start: 2, end: 7, namespace: "mark" }];
    let tokens = text(0, 9);
    let admission = Admission { marked: &marked, namespace: "own", ..Admission::new(&tokens) };
    let request = cache.admit(&admission).unwrap();
    let fork = request.fork().unwrap();
    drop(request);
    assert_eq!(known(), 2);
    drop(fork);
    assert_eq!(known(), 0, "nothing was learnt");

    let book = text(500, 16);
    let mut request = cache.admit(&Admission { namespace: "kb", ..Admission::new(&book) }).unwrap();
    request.commit(16, 16).unwrap();
    request.freeze("book", 0..16).unwrap();
    drop(request);
    // The document is given up and evicted: it still waits for its text.
    learn(&cache, &text(1000, 80), "", 0);
    learn(&cache, &text(2000, 80), "", 0);
    assert_eq!((cache.frozen(None)[0].resident_blocks, known()), (0, 2));
    learn(&cache, &book, "kb", 0);
    cache.rebalance();
    assert_eq!(cache.frozen(None)[0].resident_blocks, 4);
    cache.delete_frozen("book", "kb").unwrap();
    learn(&cache, &text(1000, 80), "", 0);
    assert_eq!(known(), 1);
    cache.check().unwrap();
}

proptest! {
    /// Numbers of namespaces that are gone go to others, which find nothing of theirs.
    #[test]
    fn a_number_is_never_of_two_namespaces(
        steps in proptest::collection::vec((0u8..12, 0u64..2, any::<bool>()), 1..60),
    ) {
        let cache = cache(6);
        let tokens = text(0, 8);
        let mut learnt = BTreeSet::new();
        for (which, regime, elsewhere) in steps {
            let namespace = which.to_string();
            let found = cache.lookup_prefix_in(&tokens, &namespace, regime);
            prop_assert!(found == 0 || learnt.contains(&(which, regime)));
            if elsewhere {
                // Text of its own, which evicts others.
                learn(&cache, &text(100 + 8 * u32::from(which), 8), &namespace, regime);
                continue;
            }
            let marked = [MarkedSegment { start: 0, end: 8, namespace: &namespace }];
            let asked = [&tokens[..], &[9]].concat();
            let admission =
                Admission { marked: &marked, namespace: "asks", regime, ..Admission::new(&asked) };
            let request = cache.admit(&admission).unwrap();
            let reused = request.plan().segment_tokens();
            prop_assert!(reused == 0 || learnt.contains(&(which, regime)));
            drop(request);
            let admission = Admission {
                namespace: &namespace, regime, reuse: Reuse::None, ..Admission::new(&tokens)
            };
            cache.admit(&admission).unwrap().commit(8, 8).unwrap();
            learnt.insert((which, regime));
            prop_assert!(cache.stats().namespaces <= 6);
            cache.check().unwrap();
        }
    }
}
