//! Room for a document, asked before anything of it is computed, against really freezing it.

use kvweave_core::{Admission, CacheConfig, ErrorKind, KvCache, KvDtype, KvShape, Request, Reuse};
use proptest::prelude::*;

const PAGE: usize = 4;
const BLOCKS: u64 = 24;

fn cache(share: u8) -> KvCache {
    let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
    let config = CacheConfig { frozen_share: share, ..CacheConfig::new(shape, 0) };
    KvCache::new(config.sized_for(BLOCKS).unwrap()).unwrap()
}

/// Texts that begin alike: those of one seed are the same one, cut at different ends.
fn text(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|at| if at < 6 { at } else { 1000 * seed + at }).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Insert(&'static str, &'static str, u32, usize),
    Compute(&'static str, u32, usize),
    Hold(u32, usize),
    Release,
    Delete(&'static str, &'static str),
}

fn op() -> impl Strategy<Value = Op> {
    let name = || prop_oneof![Just("a"), Just("b")];
    let space = || prop_oneof![Just("x"), Just("y")];
    let length = || 1usize..12 * PAGE;
    prop_oneof![
        5 => (name(), space(), 0u32..3, length()).prop_map(|(n, s, t, l)| Op::Insert(n, s, t, l)),
        2 => (space(), 0u32..3, length()).prop_map(|(s, t, l)| Op::Compute(s, t, l)),
        1 => (7u32..9, length()).prop_map(|(t, l)| Op::Hold(t, l)),
        1 => Just(Op::Release),
        1 => (name(), space()).prop_map(|(n, s)| Op::Delete(n, s)),
    ]
}

fn admission<'a>(tokens: &'a [u32], namespace: &'a str, reuse: Reuse) -> Admission<'a> {
    Admission { namespace, reuse, ..Admission::new(tokens) }
}

fn computed(cache: &KvCache, tokens: &[u32], namespace: &str, reuse: Reuse) -> Option<Request> {
    let mut request = cache.admit(&admission(tokens, namespace, reuse)).ok()?;
    request.take_copies();
    request.finish_copies();
    request.commit(tokens.len(), tokens.len()).unwrap();
    Some(request)
}

/// Inserts a document as far as it may be; what is said before is what freezing says then.
fn insert(cache: &KvCache, name: &str, namespace: &str, tokens: &[u32]) {
    let before = cache.stats();
    let asked = cache.require_frozen_room(name, tokens, (namespace, 0), &[]);
    assert_eq!(cache.stats(), before, "asking changes nothing");
    cache.check().unwrap();
    let Ok(mut request) = cache.admit(&admission(tokens, namespace, Reuse::None)) else {
        assert!(asked.is_err(), "there was room, and no admission");
        return;
    };
    let then = request.require_frozen_room(name, &[]);
    if let Err(error) = &asked {
        assert!(matches!(error.kind(), ErrorKind::PoolFull { .. }), "{error}");
        assert!(then.is_err(), "{error}: refused what fits");
    }
    request.commit(tokens.len(), tokens.len()).unwrap();
    let frozen = request.freeze(name, 0..tokens.len());
    assert_eq!(then.is_ok(), frozen.is_ok(), "{then:?}, {frozen:?}");
    if before.frozen_absent + cache.stats().frozen_absent == 0 {
        assert_eq!(asked.is_ok(), frozen.is_ok(), "{asked:?}, {frozen:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn what_is_said_of_a_document_is_what_freezing_says(
        ops in prop::collection::vec(op(), 1..24),
        share in prop::sample::select(vec![0u8, 13, 50, 80, 100]),
    ) {
        let cache = cache(share);
        let mut held = Vec::new();
        for op in ops {
            match op {
                Op::Insert(name, namespace, seed, length) => {
                    insert(&cache, name, namespace, &text(seed, length));
                }
                Op::Compute(namespace, seed, length) => {
                    drop(computed(&cache, &text(seed, length), namespace, Reuse::Prefix));
                }
                Op::Hold(seed, length) => {
                    held.extend(computed(&cache, &text(seed, length), "x", Reuse::Prefix));
                }
                Op::Release => drop(held.pop()),
                Op::Delete(name, namespace) => drop(cache.delete_frozen(name, namespace)),
            }
            cache.check().unwrap();
        }
    }
}

fn named(namespace: &str, name: &str) -> [(String, String); 1] {
    [(namespace.to_owned(), name.to_owned())]
}

#[test]
fn text_that_a_prompt_left_needs_room_as_any_other() {
    let cache = cache(50);
    let full = text(1, 12 * PAGE);
    insert(&cache, "a", "", &full);
    assert_eq!(cache.stats().frozen_blocks, 12);
    let other = text(2, 5 * PAGE);
    let asks = || cache.require_frozen_room("b", &other, ("", 0), &[]).unwrap_err().kind();
    let refused = ErrorKind::PoolFull { needed: 4, free: 0 };
    assert_eq!(asks(), refused);
    drop(computed(&cache, &other, "", Reuse::Prefix));
    assert_eq!(asks(), refused);
    // One block of it is the other document's; the entry that has it is not asked to go twice.
    cache.require_frozen_room("a", &other, ("", 0), &[]).unwrap();
    // Of the twelve that are frozen four would give way to what is computed, and be needed again.
    let error = cache.require_frozen_room("a", &text(1, 13 * PAGE), ("", 0), &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolFull { needed: 5, free: 4 });
    // What is said to go makes room.
    cache.require_frozen_room("b", &other, ("", 0), &named("", "a")).unwrap();
    let error = cache.require_frozen_room("b", &other, ("y", 0), &named("y", "a")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolFull { needed: 5, free: 0 });
}

#[test]
fn a_quota_is_room_too() {
    let cache = cache(50);
    cache.set_quota("x", Some(3)).unwrap();
    cache.require_frozen_room("a", &text(1, 3 * PAGE), ("x", 0), &[]).unwrap();
    let error = cache.require_frozen_room("a", &text(1, 3 * PAGE + 1), ("x", 0), &[]).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::QuotaExceeded { .. }), "{error}");
    let mut request = computed(&cache, &text(1, 3 * PAGE + 1), "x", Reuse::None).unwrap();
    assert!(request.require_frozen_room("a", &[]).is_err());
    assert!(request.freeze("a", 0..3 * PAGE + 1).is_err());
}
