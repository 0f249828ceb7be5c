//! Quotas of namespaces: what is beyond them is refused or goes first, and others notice nothing.

use kvweave_core::{
    Admission, Advice, CacheConfig, ErrorKind, Eviction, Hint, KvCache, KvDtype, KvShape,
    MarkedSegment, Quota, Request,
};
use proptest::prelude::*;

const PAGE: usize = 4;

fn cache_of(blocks: u64, eviction: Eviction) -> KvCache {
    let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
    let config = CacheConfig::new(shape, 0).sized_for(blocks).unwrap();
    KvCache::new(CacheConfig { eviction, ..config }).unwrap()
}

fn cache(blocks: u64) -> KvCache {
    cache_of(blocks, Eviction::Lru)
}

fn text(from: u32, blocks: usize) -> Vec<u32> {
    (from..from + (blocks * PAGE) as u32).collect()
}

/// None where there is no room.
fn learn(cache: &KvCache, namespace: &str, tokens: &[u32]) -> Option<Request> {
    let mut request = cache.admit(&Admission { namespace, ..Admission::new(tokens) }).ok()?;
    request.take_copies();
    request.finish_copies();
    request.commit(tokens.len(), tokens.len()).unwrap();
    Some(request)
}

fn learnt(cache: &KvCache, namespace: &str, tokens: &[u32]) -> Request {
    learn(cache, namespace, tokens).unwrap()
}

fn cached(cache: &KvCache, namespace: &str, tokens: &[u32]) -> usize {
    cache.lookup_prefix(tokens, namespace) / PAGE
}

fn quota(cache: &KvCache, namespace: &str) -> Option<Quota> {
    cache.stats().quotas.into_iter().find(|quota| quota.namespace == namespace)
}

fn resident(cache: &KvCache, namespace: &str) -> usize {
    cache.frozen(Some(namespace)).iter().map(|segment| segment.resident_blocks).sum()
}

#[test]
fn what_is_beyond_a_quota_goes_first_and_only_where_room_is_wanted() {
    for eviction in [Eviction::Lru, Eviction::CostAware] {
        let cache = cache_of(12, eviction);
        cache.set_quota("a", Some(2)).unwrap();
        drop(learnt(&cache, "b", &text(100, 4)));
        drop(learnt(&cache, "a", &text(200, 3)));
        drop(learnt(&cache, "a", &text(300, 3)));
        let quota = quota(&cache, "a").unwrap();
        assert_eq!((quota.blocks, quota.frozen, quota.cached), (2, 0, 6));
        // The text of b is the oldest, and all of it stays while a is beyond its quota.
        for (blocks, left) in [(3, 5), (4, 4), (6, 2)] {
            drop(cache.admit(&Admission::new(&text(900, blocks))).unwrap());
            let of_a = cached(&cache, "a", &text(200, 3)) + cached(&cache, "a", &text(300, 3));
            assert_eq!((of_a, cached(&cache, "b", &text(100, 4))), (left, 4), "{eviction:?}");
            cache.check().unwrap();
        }
        assert_eq!(cached(&cache, "a", &text(300, 3)), 2, "the latest are kept");
        // Within the quota both are alike: b's are the oldest.
        drop(cache.admit(&Admission::new(&text(900, 7))).unwrap());
        assert_eq!(cached(&cache, "b", &text(100, 4)), 3);
        assert_eq!(cached(&cache, "a", &text(300, 3)), 2);
        cache.check().unwrap();
    }
}

#[test]
fn what_is_past_its_time_goes_before_what_is_beyond_a_quota() {
    let cache = cache_of(8, Eviction::CostAware);
    cache.set_quota("a", Some(0)).unwrap();
    drop(learnt(&cache, "a", &text(100, 4)));
    let request = learnt(&cache, "b", &text(200, 4));
    request.advise(0..16, Advice { hint: Hint::Done, ..Advice::default() }).unwrap();
    drop(request);
    drop(cache.admit(&Admission::new(&text(900, 4))).unwrap());
    assert_eq!((cached(&cache, "a", &text(100, 4)), cached(&cache, "b", &text(200, 4))), (4, 0));
    cache.check().unwrap();
}

#[test]
fn a_quota_may_come_late_and_go() {
    let cache = cache(8);
    drop(learnt(&cache, "a", &text(100, 4)));
    drop(learnt(&cache, "b", &text(200, 4)));
    let newest = text(200, 4);
    cache.set_quota("b", Some(1)).unwrap();
    assert_eq!(quota(&cache, "b").unwrap().cached, 4);
    drop(cache.admit(&Admission::new(&text(900, 3))).unwrap());
    assert_eq!((cached(&cache, "a", &text(100, 4)), cached(&cache, "b", &newest)), (4, 1));
    cache.set_quota("b", None).unwrap();
    assert!(cache.stats().quotas.is_empty());
    drop(cache.admit(&Admission::new(&text(900, 6))).unwrap());
    assert_eq!((cached(&cache, "a", &text(100, 4)), cached(&cache, "b", &newest)), (1, 1));
    cache.set_quota("never used", None).unwrap();
    cache.check().unwrap();
}

#[test]
fn a_document_beyond_the_quota_is_refused_and_changes_nothing() {
    let cache = cache(40);
    cache.set_quota("a", Some(4)).unwrap();
    learnt(&cache, "a", &text(100, 3)).freeze("one", 0..12).unwrap();
    let mut request = learnt(&cache, "a", &text(200, 5));
    let before = cache.stats();
    let error = request.freeze("two", 0..20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded { needed: 5, free: 1 });
    let said = "quota of namespace \"a\": expected 5 blocks to be available, got 1";
    assert_eq!(error.to_string(), said);
    assert_eq!(cache.stats(), before);
    // What it would replace counts as free.
    let error = request.freeze("one", 0..20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded { needed: 5, free: 4 });
    assert_eq!(cache.stats(), before);
    request.freeze("one", 0..16).unwrap();
    // Equal content is stored once, and paid for once.
    request.freeze("again", 0..16).unwrap();
    assert_eq!(quota(&cache, "a").unwrap().frozen, 4);
    cache.delete_frozen("one", "a").unwrap();
    assert_eq!(quota(&cache, "a").unwrap().frozen, 4);
    cache.delete_frozen("again", "a").unwrap();
    assert_eq!(quota(&cache, "a").unwrap().frozen, 0);
    // Nobody else is bound by it.
    learnt(&cache, "b", &text(300, 10)).freeze("long", 0..40).unwrap();
    cache.check().unwrap();
}

#[test]
fn who_pins_pays_also_for_content_of_another_namespace() {
    let cache = cache(40);
    cache.set_quota("tenant", Some(1)).unwrap();
    cache.set_quota("common", Some(0)).unwrap();
    let tokens = text(100, 2);
    let marked = [MarkedSegment { start: 0, end: 8, namespace: "common" }];
    let admission = Admission { namespace: "tenant", marked: &marked, ..Admission::new(&tokens) };
    let mut request = cache.admit(&admission).unwrap();
    request.commit(8, 8).unwrap();
    let error = request.freeze("both", 0..8).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::QuotaExceeded { needed: 2, free: 1 });
    request.freeze("half", 0..4).unwrap();
    assert_eq!(quota(&cache, "tenant").unwrap().frozen, 1);
    assert_eq!(quota(&cache, "common").unwrap().frozen, 0);
    cache.check().unwrap();
}

#[test]
fn a_lower_quota_takes_pins_and_a_higher_one_brings_them_back() {
    let cache = cache(40);
    learnt(&cache, "a", &text(100, 4)).freeze("cold", 0..16).unwrap();
    learnt(&cache, "a", &text(200, 4)).freeze("warm", 0..16).unwrap();
    learnt(&cache, "b", &text(300, 4)).freeze("other", 0..16).unwrap();
    for _ in 0..3 {
        let asked = [text(200, 4), vec![7]].concat();
        drop(cache.admit(&Admission { namespace: "a", ..Admission::new(&asked) }).unwrap());
    }
    cache.set_quota("a", Some(5)).unwrap();
    let of = |name: &str| cache.frozen_segment(name, "a").unwrap().resident_blocks;
    assert_eq!((of("cold"), of("warm"), resident(&cache, "b")), (1, 4, 4));
    assert_eq!(cache.stats().frozen_absent, 3);
    cache.rebalance();
    assert_eq!(
        (of("cold"), of("warm")),
        (1, 4),
        "there is room in the arena, and none in the quota"
    );
    cache.check().unwrap();
    cache.set_quota("a", Some(7)).unwrap();
    assert_eq!((of("cold"), of("warm")), (3, 4));
    cache.delete_frozen("warm", "a").unwrap();
    cache.rebalance();
    assert_eq!((of("cold"), cache.stats().frozen_absent), (4, 0));
    cache.set_quota("a", Some(0)).unwrap();
    assert_eq!((of("cold"), resident(&cache, "b")), (0, 4));
    cache.set_quota("a", None).unwrap();
    assert_eq!(of("cold"), 4);
    cache.check().unwrap();
}

#[test]
fn blocks_that_wait_for_their_quota_keep_no_others_waiting() {
    let cache = cache(20);
    learnt(&cache, "a", &text(100, 4)).freeze("first", 0..16).unwrap();
    learnt(&cache, "b", &text(200, 4)).freeze("second", 0..16).unwrap();
    cache.set_quota("a", Some(1)).unwrap();
    let busy = cache.admit(&Admission::new(&text(900, 14))).unwrap();
    assert_eq!((resident(&cache, "a"), resident(&cache, "b")), (1, 3), "one yields");
    drop(busy);
    // What a has waiting is older, and stays out.
    cache.rebalance();
    assert_eq!((resident(&cache, "a"), resident(&cache, "b")), (1, 4));
    cache.check().unwrap();
}

#[test]
fn quotas_are_numbered() {
    let cache = cache(8);
    const MOST: usize = 1 << 16;
    for number in 0..MOST {
        cache.set_quota(&number.to_string(), Some(number)).unwrap();
    }
    let error = cache.set_quota("one more", Some(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    cache.set_quota("7", Some(8)).unwrap();
    for number in 1000..2000 {
        cache.set_quota(&number.to_string(), None).unwrap();
    }
    cache.set_quota("one more", Some(1)).unwrap();
    let quotas = cache.stats().quotas;
    assert_eq!(quotas.len(), MOST - 1000 + 1);
    let said = |quota: &&Quota| quota.blocks.to_string() == quota.namespace;
    assert_eq!(quotas.iter().filter(said).count(), MOST - 1000 - 1);
    cache.check().unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Learn { namespace: usize, which: u32, blocks: usize, keep: bool },
    Freeze { namespace: usize, which: u32, blocks: usize },
    Delete { namespace: usize, which: u32 },
    Quota { namespace: usize, blocks: Option<usize> },
    Drop,
    Rebalance,
}

const NAMESPACES: [&str; 3] = ["a", "b", "c"];

fn step() -> impl Strategy<Value = Step> {
    let blocks = 1usize..7;
    prop_oneof![
        4 => (0..3usize, 0..5u32, blocks.clone(), any::<bool>()).prop_map(
            |(namespace, which, blocks, keep)| Step::Learn { namespace, which, blocks, keep }
        ),
        4 => (0..3usize, 0..3u32, blocks).prop_map(
            |(namespace, which, blocks)| Step::Freeze { namespace, which, blocks }
        ),
        1 => (0..3usize, 0..3u32).prop_map(|(namespace, which)| Step::Delete { namespace, which }),
        2 => (0..2usize, proptest::option::of(0usize..9)).prop_map(
            |(namespace, blocks)| Step::Quota { namespace, blocks }
        ),
        2 => Just(Step::Drop),
        1 => Just(Step::Rebalance),
    ]
}

/// Texts of a namespace differ from those of others and from each other in every block.
fn own_text(namespace: usize, which: u32, blocks: usize) -> Vec<u32> {
    text(10_000 * (namespace as u32 + 1) + 100 * which, blocks)
}

proptest! {
    /// Whatever comes, and whoever is refused: documents of a namespace pin no more than its quota,
    /// the books count what a list of documents shows, and a refusal changes nothing.
    #[test]
    fn no_namespace_is_ever_above_its_quota(
        steps in proptest::collection::vec(step(), 1..80), cost_aware in any::<bool>(),
    ) {
        let cache = cache_of(24, if cost_aware { Eviction::CostAware } else { Eviction::Lru });
        let mut quotas = [None; 3];
        let mut live = Vec::new();
        for step in steps {
            match step {
                Step::Learn { namespace, which, blocks, keep } => {
                    let tokens = own_text(namespace, which, blocks);
                    let request = learn(&cache, NAMESPACES[namespace], &tokens);
                    live.extend(request.filter(|_| keep));
                }
                Step::Freeze { namespace, which, blocks } => {
                    let tokens = own_text(namespace, which, blocks);
                    let Some(mut request) = learn(&cache, NAMESPACES[namespace], &tokens) else {
                        continue;
                    };
                    let (before, listed) = (cache.stats(), cache.frozen(None));
                    match request.freeze(&which.to_string(), 0..tokens.len()) {
                        Ok(()) => prop_assert!(quotas[namespace].is_none_or(|most| blocks <= most)),
                        Err(error) => {
                            let known = matches!(
                                error.kind(),
                                ErrorKind::QuotaExceeded { .. } | ErrorKind::PoolFull { .. }
                            );
                            prop_assert!(known, "{}", error);
                            prop_assert_eq!(cache.stats(), before);
                            prop_assert_eq!(cache.frozen(None), listed);
                        }
                    }
                }
                Step::Delete { namespace, which } => {
                    let _ = cache.delete_frozen(&which.to_string(), NAMESPACES[namespace]);
                }
                Step::Quota { namespace, blocks } => {
                    let others = |cache: &KvCache| -> Vec<usize> {
                        let others = (0..3).filter(|&other| other != namespace);
                        others.map(|other| resident(cache, NAMESPACES[other])).collect()
                    };
                    let before = others(&cache);
                    cache.set_quota(NAMESPACES[namespace], blocks).unwrap();
                    quotas[namespace] = blocks;
                    let after = others(&cache);
                    prop_assert!(after.iter().zip(&before).all(|(after, before)| after >= before));
                }
                Step::Drop => drop(live.pop()),
                Step::Rebalance => cache.rebalance(),
            }
            cache.check().unwrap();
            let held = cache.stats().groups[0];
            prop_assert_eq!(held.free + held.held + held.cached, held.total);
            for (namespace, most) in NAMESPACES.iter().zip(quotas) {
                let found = quota(&cache, namespace);
                prop_assert_eq!(found.as_ref().map(|quota| quota.blocks), most);
                if let Some(quota) = found {
                    prop_assert_eq!(quota.frozen, resident(&cache, namespace));
                    prop_assert!(quota.frozen <= quota.blocks);
                }
            }
        }
    }

    /// While a namespace is beyond its quota, text of others that nobody touches is never evicted.
    #[test]
    fn others_keep_what_they_have_while_somebody_is_beyond_a_quota(
        quota in 0usize..4,
        of_a in proptest::collection::vec(1usize..4, 1..5),
        wanted in 1usize..12,
    ) {
        let cache = cache(20);
        cache.set_quota("a", Some(quota)).unwrap();
        drop(learnt(&cache, "b", &text(100, 5)));
        for (which, &blocks) in (0..).zip(&of_a) {
            drop(learnt(&cache, "a", &own_text(0, which, blocks)));
        }
        let of_a: usize = of_a.iter().sum();
        drop(cache.admit(&Admission::new(&text(900, wanted))).unwrap());
        let free = 20 - 5 - of_a;
        let beyond = of_a.saturating_sub(quota);
        let lost = wanted.saturating_sub(free + beyond);
        prop_assert_eq!(cached(&cache, "b", &text(100, 5)), 5 - lost.min(5));
        cache.check().unwrap();
    }
}
