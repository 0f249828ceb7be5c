//! What a namespace leaves behind when it is forgotten, and which pages are said to be freed.

use kvweave_core::{Admission, CacheConfig, KvCache, KvDtype, KvShape, Request, Reuse};
use proptest::prelude::*;

const PAGE: usize = 4;

fn cache(blocks: u64) -> KvCache {
    let shape = KvShape::new(2, 3, 8, PAGE as u32, KvDtype::F32).unwrap();
    KvCache::new(CacheConfig::new(shape, 0).sized_for(blocks).unwrap()).unwrap()
}

fn admitted(cache: &KvCache, tokens: &[u32], namespace: &str, regime: u64) -> Option<Request> {
    cache.admit(&Admission { namespace, regime, ..Admission::new(tokens) }).ok()
}

fn computed(cache: &KvCache, tokens: &[u32], namespace: &str, regime: u64) {
    let mut request = admitted(cache, tokens, namespace, regime).unwrap();
    request.commit(tokens.len(), tokens.len()).unwrap();
}

/// Pages that are set in runs.
fn pages(runs: &[[i32; 2]]) -> Vec<i32> {
    runs.iter().flat_map(|&[first, count]| first..first + count).collect()
}

#[test]
fn what_is_cached_of_a_namespace_goes_in_all_its_regimes() {
    let cache = cache(16);
    cache.note_freed_pages().unwrap();
    let text: Vec<u32> = (0..10).collect();
    for (namespace, regime) in [("a", 0), ("a", 7), ("b", 0)] {
        computed(&cache, &text, namespace, regime);
    }
    assert!(cache.take_freed().is_empty(), "all is cached");
    assert_eq!(cache.forget(Some("a")), 6);
    assert_eq!(pages(&cache.take_freed()).len(), 6 * 6);
    assert_eq!((cache.forget(Some("a")), cache.forget(Some("c"))), (0, 0));
    for regime in [0, 7] {
        assert_eq!(cache.lookup_prefix_in(&text, "a", regime), 0);
        assert_eq!(cache.lookup_segment(&text, "a", regime), 0);
    }
    assert_eq!(cache.lookup_prefix(&text, "b"), 10);
    cache.check().unwrap();
}

#[test]
fn all_namespaces_are_forgotten_at_once() {
    let cache = cache(16);
    let text: Vec<u32> = (0..10).collect();
    for (namespace, regime) in [("a", 0), ("a", 7), ("b", 0), ("", 0)] {
        computed(&cache, &text, namespace, regime);
    }
    let request = admitted(&cache, &text, "b", 0).unwrap();
    assert_eq!(cache.forget(None), 9, "but what is held");
    for namespace in ["a", ""] {
        assert_eq!(cache.lookup_prefix(&text, namespace), 0);
    }
    drop(request);
    assert_eq!(cache.forget(None), 3);
    assert_eq!(cache.lookup_prefix(&text, "b"), 0);
    cache.check().unwrap();
}

#[test]
fn what_is_held_or_frozen_stays() {
    let cache = cache(16);
    let text: Vec<u32> = (0..12).collect();
    let mut request = admitted(&cache, &text, "a", 0).unwrap();
    request.commit(12, 12).unwrap();
    request.freeze("book", 0..8).unwrap();
    assert_eq!(cache.forget(Some("a")), 0);
    drop(request);
    assert_eq!(cache.forget(Some("a")), 1, "what no document holds");
    assert_eq!(cache.lookup_prefix(&text, "a"), 8);
    cache.delete_frozen("book", "a").unwrap();
    assert_eq!(cache.forget(Some("a")), 2);
    cache.check().unwrap();
}

#[test]
fn pages_are_said_to_be_freed_when_their_content_can_be_found_no_more() {
    let cache = cache(4);
    cache.note_freed_pages().unwrap();
    let request = admitted(&cache, &[1; 9], "", 0).unwrap();
    assert!(cache.take_freed().is_empty());
    drop(request);
    assert_eq!(pages(&cache.take_freed()).len(), 3 * 6, "nothing was committed");
    computed(&cache, &[2; 16], "a", 0);
    assert!(cache.take_freed().is_empty());
    // What it takes was evicted for it in the same call.
    let _request = admitted(&cache, &[3; 8], "b", 0).unwrap();
    assert!(pages(&cache.take_freed()).len() >= 2 * 6);
    cache.check().unwrap();
}

#[test]
fn what_was_committed_and_never_came_is_found_by_nobody() {
    let cache = cache(16);
    let text: Vec<u32> = (0..10).collect();
    let alone = || Admission { namespace: "a", reuse: Reuse::None, ..Admission::new(&text) };
    let mut frozen = cache.admit(&alone()).unwrap();
    frozen.commit(10, 10).unwrap();
    frozen.freeze("book", 0..10).unwrap();
    drop(frozen);
    // Its blocks go, and come back in those of a request whose KV then does not come.
    let all: Vec<u32> = (100..164).collect();
    drop(admitted(&cache, &all, "", 0).unwrap());
    assert_eq!(cache.lookup_prefix(&text, "a"), 0);
    let mut coming = cache.admit(&alone()).unwrap();
    coming.commit(10, 10).unwrap();
    // Others hold them meanwhile, and stand behind them.
    let longer: Vec<u32> = (0..20).collect();
    let mut reader = admitted(&cache, &longer, "a", 0).unwrap();
    let _ = reader.take_copies();
    reader.finish_copies();
    reader.commit(20, 20).unwrap();
    coming.retract();
    cache.check().unwrap();
    assert_eq!((cache.lookup_prefix(&text, "a"), cache.lookup_segment(&text, "a", 0)), (0, 0));
    assert!(coming.commit(10, 10).is_err());
    drop((reader, coming));
    cache.check().unwrap();
    assert!(cache.stats().groups.iter().all(|group| group.held == 0));
    // Whoever computes it has it found again, by its name too.
    computed(&cache, &text, "a", 0);
    assert_eq!(cache.lookup_prefix(&text, "a"), 10);
    cache.delete_frozen("book", "a").unwrap();
    cache.check().unwrap();
}

proptest! {
    /// A page that was written to is free only if it was said to be freed since.
    #[test]
    fn no_written_page_is_free_unheard_of(
        steps in proptest::collection::vec((0u8..5, 0u32..4, 1usize..20, any::<bool>()), 1..60),
    ) {
        let cache = cache(12);
        cache.note_freed_pages().unwrap();
        let (mut live, mut written): (Vec<Request>, _) = (Vec::new(), [false; 13 * 6]);
        for (step, text, length, commits) in steps {
            let namespace = ["a", "b"][text as usize % 2];
            match step {
                0 | 1 => {
                    let tokens: Vec<u32> = (0..length as u32).map(|i| text * 100 + i).collect();
                    if let Some(mut request) = admitted(&cache, &tokens, namespace, 0) {
                        // Whoever overwrites does so before the request writes.
                        for page in pages(&cache.take_freed()) {
                            written[page as usize] = false;
                        }
                        let shared = request.plan().prefix_tokens() / PAGE * PAGE;
                        for [block, _, _, position, _] in request.entries() {
                            if position as usize >= shared {
                                let own = &mut written[block as usize..block as usize + 6];
                                prop_assert!(!own.contains(&true), "others wrote there");
                                own.fill(true);
                            }
                        }
                        if commits {
                            request.take_copies();
                            request.finish_copies();
                            request.commit(length, length).unwrap();
                        }
                        live.push(request);
                    }
                }
                2 if !live.is_empty() => drop(live.remove(length % live.len())),
                3 => {
                    let _ = cache.forget(Some(namespace));
                }
                _ => live.clear(),
            }
            cache.check().unwrap();
        }
        live.clear();
        let _ = (cache.forget(Some("a")), cache.forget(Some("b")));
        for page in pages(&cache.take_freed()) {
            written[page as usize] = false;
        }
        prop_assert!(!written.iter().any(|&page| page), "something that nobody finds is left");
    }
}
