//! Which cached blocks are given up first, seen from a cache.

use kvweave_core::{
    Admission, Advice, CacheConfig, ErrorKind, Eviction, Hint, KvCache, KvDtype, KvShape, Past,
    Request,
};
use proptest::prelude::*;

const PAGE: usize = 4;
const ROOM: u64 = 8;
const ALL: [Eviction; 4] = [Eviction::Lru, Eviction::CostAware, Eviction::S3Fifo, Eviction::Lfu];

fn cache(eviction: Eviction) -> KvCache {
    let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
    let config = CacheConfig::new(shape, 0).sized_for(ROOM).unwrap();
    KvCache::new(CacheConfig { eviction, ..config }).unwrap()
}

fn text(from: u32, blocks: usize) -> Vec<u32> {
    (from..from + (blocks * PAGE) as u32).collect()
}

fn learn(cache: &KvCache, tokens: &[u32], advice: Option<Advice>) {
    let mut request = cache.admit(&Admission::new(tokens)).unwrap();
    request.take_copies();
    request.commit(tokens.len(), tokens.len()).unwrap();
    if let Some(advice) = advice {
        request.advise(0..tokens.len(), advice).unwrap();
    }
}

/// Which of three texts of two blocks are left, after text for four more blocks has come.
fn left(eviction: Eviction, advice: [Option<Advice>; 3], now: u64) -> [bool; 3] {
    let cache = cache(eviction);
    let texts = [text(100, 2), text(200, 2), text(300, 2)];
    for (text, advice) in texts.iter().zip(advice) {
        learn(&cache, text, advice);
    }
    cache.set_time(now);
    learn(&cache, &text(1000, 4), None);
    cache.check().unwrap();
    texts.map(|text| cache.lookup_prefix(&text, "") == text.len())
}

#[test]
fn without_advice_every_order_gives_up_what_was_used_longest_ago() {
    for eviction in ALL {
        assert_eq!(left(eviction, [None; 3], 0), [false, true, true], "{eviction:?}");
    }
}

#[test]
fn the_other_orders_have_no_use_for_advice() {
    let dear = Advice { priority: 9, cost: 1000, ..Advice::default() };
    for eviction in [Eviction::Lru, Eviction::S3Fifo, Eviction::Lfu] {
        assert_eq!(left(eviction, [Some(dear), None, None], 0), [false, true, true]);
    }
}

#[test]
fn advice_is_followed() {
    let plain = Advice::default();
    let of = |advice: Advice| left(Eviction::CostAware, [Some(advice), None, None], 0);
    assert_eq!(of(Advice { priority: 1, ..plain }), [true, false, true]);
    assert_eq!(of(Advice { cost: 50, ..plain }), [true, false, true]);
    assert_eq!(of(Advice { hint: Hint::Soon, ..plain }), [true, false, true]);
    let last = |advice, now| left(Eviction::CostAware, [None, None, Some(advice)], now);
    assert_eq!(last(Advice { hint: Hint::Done, priority: 9, ..plain }, 0), [true, true, false]);
    let timed = Advice { until: 10, priority: 9, ..plain };
    assert_eq!(last(timed, 9), [false, true, true]);
    assert_eq!(last(timed, 10), [true, true, false]);
}

#[test]
fn advice_that_ends_leaves_a_text_as_any_other() {
    let kept = Advice { until: 10, past: Past::Plain, priority: 9, ..Advice::default() };
    let first = |now| left(Eviction::CostAware, [Some(kept), None, None], now);
    assert_eq!(first(9), [true, false, true]);
    let last = |now| left(Eviction::CostAware, [None, None, Some(kept)], now);
    assert_eq!((last(9), last(10)), ([false, true, true], [false, true, true]));
    // It ended while the text was held: nothing is left of it when that is let go of.
    let cache = cache(Eviction::CostAware);
    let text = text(100, 2);
    let held = cache.admit(&Admission::new(&text)).unwrap();
    drop(held);
    learn(&cache, &text, None);
    let request = cache.admit(&Admission::new(&text)).unwrap();
    request.advise(0..PAGE, kept).unwrap();
    cache.set_time(10);
    drop(request);
    for number in 2..12 {
        learn(&cache, &self::text(100 * number, 2), None);
    }
    assert_eq!(cache.lookup_prefix(&text, ""), 0);
    cache.check().unwrap();
}

/// Two caches of the same order that are told the same, and what is held of them.
struct Twins {
    caches: [KvCache; 2],
    held: Vec<(Vec<u32>, [Request; 2])>,
}

impl Twins {
    /// A text of so many blocks comes; whether it found room, which both say alike.
    fn learn(&mut self, tokens: Vec<u32>, holds: bool) -> bool {
        let admitted = self.caches.each_ref().map(|cache| {
            let mut request = cache.admit(&Admission::new(&tokens)).ok()?;
            request.take_copies();
            request.finish_copies();
            request.commit(tokens.len(), tokens.len()).unwrap();
            Some(request)
        });
        match admitted {
            [Some(one), Some(other)] => {
                if holds {
                    self.held.push((tokens, [one, other]));
                }
                true
            }
            refused => {
                assert!(refused.iter().all(Option::is_none), "one of two finds room");
                false
            }
        }
    }

    /// Whole blocks that a request found and holds are found still, and all texts by both alike.
    fn check(&self, texts: &[Vec<u32>]) {
        for (tokens, [one, _]) in &self.held {
            let found = one.plan().prefix_tokens() / PAGE * PAGE;
            assert!(self.caches[0].lookup_prefix(tokens, "") >= found, "what is held has gone");
        }
        for tokens in texts {
            let [one, other] = self.caches.each_ref().map(|cache| cache.lookup_prefix(tokens, ""));
            assert_eq!(one, other);
        }
        self.caches.iter().for_each(|cache| cache.check().unwrap());
    }
}

proptest! {
    /// Whatever comes and goes, by every order: what is held stays, each block comes back, and the
    /// same is done twice.
    #[test]
    fn every_order_keeps_what_is_held_and_gives_every_block_back(
        which in 0..ALL.len(),
        steps in proptest::collection::vec((0u32..5, 1usize..4, any::<bool>(), 0u8..4), 1..50),
    ) {
        let caches = [(); 2].map(|()| cache(ALL[which]));
        let mut twins = Twins { caches, held: Vec::new() };
        let texts: Vec<Vec<u32>> = (0..5).map(|number| text(100 * number, 3)).collect();
        for (now, (number, blocks, holds, hint)) in steps.into_iter().enumerate() {
            let tokens = texts[number as usize][..blocks * PAGE].to_vec();
            let fits = twins.learn(tokens.clone(), holds);
            prop_assert!(fits || !twins.held.is_empty(), "a text finds room where nothing is held");
            let hint = [Hint::None, Hint::None, Hint::Soon, Hint::Done][usize::from(hint)];
            let until = now as u64 + 3;
            let advice = Advice { hint, until, past: Past::Plain, priority: 1, cost: 2 };
            for cache in &twins.caches {
                cache.set_time(now as u64);
                cache.advise(&tokens, 0..usize::MAX, ("", 0), advice);
            }
            twins.check(&texts);
            if !fits || twins.held.len() > 2 {
                twins.held.remove(0);
            }
            twins.check(&texts);
        }
        twins.held.clear();
        let stats = twins.caches[0].stats().groups[0];
        prop_assert_eq!((stats.held, stats.free + stats.cached), (0, stats.total));
        let all = text(1000, stats.total);
        prop_assert!(twins.learn(all, false), "every block comes back");
        twins.check(&texts);
    }
}

#[test]
fn advice_goes_with_the_content() {
    let cache = cache(Eviction::CostAware);
    learn(&cache, &text(100, 8), Some(Advice { priority: 9, ..Advice::default() }));
    // It takes all blocks, and what was said of them must not stay.
    learn(&cache, &text(200, 8), None);
    learn(&cache, &text(300, 4), Some(Advice { priority: 1, ..Advice::default() }));
    learn(&cache, &text(400, 4), None);
    assert_eq!(cache.lookup_prefix(&text(300, 4), ""), 4 * PAGE);
    assert_eq!(cache.lookup_prefix(&text(200, 8), ""), 0);
    cache.check().unwrap();
}

#[test]
fn advice_is_given_of_what_is_cached_of_a_text() {
    let cache = cache(Eviction::CostAware);
    let (kept, other) = (text(100, 3), text(200, 3));
    learn(&cache, &kept[..10], None);
    learn(&cache, &other, None);
    let dear = Advice { priority: 3, ..Advice::default() };
    assert_eq!(cache.advise(&text(900, 3), 0..99, ("", 0), dear), 0);
    assert_eq!(cache.advise(&kept, 0..99, ("elsewhere", 0), dear), 0);
    assert_eq!(cache.advise(&kept, 0..99, ("", 1), dear), 0);
    assert_eq!(cache.advise(&kept, 0..99, ("", 0), dear), 10, "two blocks and a half");
    learn(&cache, &text(1000, 5), None);
    assert_eq!((cache.lookup_prefix(&kept, ""), cache.lookup_prefix(&other, "")), (10, 0));
    cache.check().unwrap();
}

#[test]
fn advice_is_given_of_the_blocks_of_a_range() {
    let cache = cache(Eviction::CostAware);
    let kept = text(100, 6);
    learn(&cache, &kept[..22], None);
    let of = |priority| Advice { priority, ..Advice::default() };
    assert_eq!(cache.advise(&kept, 0..9, ("", 0), of(4)), 9, "blocks 0 to 2");
    assert_eq!(cache.advise(&kept, 12..14, ("", 0), of(3)), 2, "block 3");
    assert_eq!(cache.advise(&kept, 19..24, ("", 0), of(2)), 3, "blocks 4 and 5");
    for (start, cached) in [(21, 1), (22, 0), (24, 0), (usize::MAX, 0)] {
        assert_eq!(cache.advise(&kept, start..usize::MAX, ("", 0), of(2)), cached);
    }
    assert_eq!(cache.advise(&kept, 5..5, ("", 0), of(2)), 0);
    for (number, priority, left) in [(1000, 9, 22), (2000, 9, 16), (3000, 3, 8), (4000, 3, 8)] {
        learn(&cache, &text(number, 2), Some(of(priority)));
        assert_eq!(cache.lookup_prefix(&kept, ""), left, "after {number}");
    }
    cache.check().unwrap();
}

#[test]
fn a_range_that_ends_where_two_texts_part_is_of_the_text_that_is_named() {
    for kept_first in [true, false] {
        let cache = cache(Eviction::CostAware);
        let (kept, mut other) = (text(100, 2), text(100, 2));
        other[6] = 900;
        for text in if kept_first { [&kept, &other] } else { [&other, &kept] } {
            learn(&cache, text, None);
        }
        let dear = Advice { priority: 3, ..Advice::default() };
        assert_eq!(cache.advise(&kept, 0..6, ("", 0), dear), 6);
        learn(&cache, &text(1000, 6), None);
        assert_eq!(cache.lookup_prefix(&kept, ""), 2 * PAGE);
        assert!(cache.lookup_prefix(&other, "") < 2 * PAGE);
    }
}

#[test]
fn a_text_that_was_advised_is_given_up_from_its_end() {
    let cache = cache(Eviction::CostAware);
    let kept = text(100, 6);
    learn(&cache, &kept, None);
    assert_eq!(
        cache.advise(&kept, 0..99, ("", 0), Advice { priority: 3, ..Advice::default() }),
        24
    );
    learn(&cache, &text(1000, 4), None);
    assert_eq!(cache.lookup_prefix(&kept, ""), 4 * PAGE);
    cache.check().unwrap();
}

#[test]
fn advice_is_of_positions_that_there_are() {
    let cache = cache(Eviction::CostAware);
    let request = cache.admit(&Admission::new(&text(1, 1))).unwrap();
    assert!(request.advise(0..0, Advice::default()).is_ok());
    for range in [0..PAGE + 1, 3..usize::MAX] {
        let refused = request.advise(range, Advice::default()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::OutOfRange);
    }
}

/// What comes again counts as used before, though it had to go meanwhile.
#[test]
fn what_comes_again_outlives_what_comes_once() {
    for (eviction, stays) in [(Eviction::Lru, false), (Eviction::CostAware, true)] {
        let cache = cache(eviction);
        let text_of = |number: u32| text(100 * number, 2);
        learn(&cache, &text_of(1), None);
        // Four others of two blocks each: the first had to go.
        (2..6).for_each(|other| learn(&cache, &text_of(other), None));
        assert_eq!(cache.lookup_prefix(&text_of(1), ""), 0);
        learn(&cache, &text_of(1), None);
        (6..10).for_each(|other| learn(&cache, &text_of(other), None));
        assert_eq!(cache.lookup_prefix(&text_of(1), "") > 0, stays, "{eviction:?}");
        cache.check().unwrap();
    }
}
