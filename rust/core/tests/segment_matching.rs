//! What is recovered of a segment, wherever it stands and however its donor lay.

mod simulated_arena;

use kvweave_core::{
    Admission, CacheConfig, HashKind, KvCache, KvDtype, KvShape, MarkedSegment, MissReason, Mode,
    Outcome, Request, SegmentSource,
};
use simulated_arena::{Arena, assert_partition};

struct World {
    cache: KvCache,
    arena: Arena,
}

fn world(hash: HashKind) -> World {
    let shape = KvShape::new(2, 1, 8, 4, KvDtype::F32).unwrap();
    let mut config = CacheConfig::new(shape, 0).sized_for(200).unwrap();
    config.hash = hash;
    World { cache: KvCache::new(config).unwrap(), arena: Arena::default() }
}

fn tokens_of(request: &Request) -> std::ops::Range<usize> {
    request.len()..request.len()
}

fn text(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

impl World {
    fn admit(&mut self, admission: &Admission<'_>) -> Request {
        let mut request = self.cache.admit(admission).unwrap();
        assert_partition(&request, admission.tokens.len());
        self.arena.prefill(&self.cache, &mut request);
        self.arena.verify(&self.cache, &request, tokens_of(&request));
        self.cache.check().unwrap();
        request
    }

    fn learn(&mut self, tokens: &[u32], namespace: &str) {
        let mut request = self.admit(&Admission { namespace, ..Admission::new(tokens) });
        request.commit(tokens.len(), tokens.len()).unwrap();
    }

    /// Admits fresh text, the segment, fresh text; returns what was found of the segment.
    fn find(&mut self, before: u32, segment: &[u32], namespace: &str) -> Vec<Outcome> {
        let mut tokens = text(9000, before);
        let (start, end) = (tokens.len(), tokens.len() + segment.len());
        tokens.extend_from_slice(segment);
        tokens.extend(text(8000, 3));
        let marked = [MarkedSegment { start, end, namespace }];
        let mut outcomes = Vec::new();
        for mode in [Mode::Materialise, Mode::Share] {
            let admission = Admission { marked: &marked, mode, ..Admission::new(&tokens) };
            let request = self.admit(&admission);
            let spans = request.plan().spans.iter();
            let inside = spans.filter(|span| span.start < end && start < span.end);
            let found = inside.map(|span| span.outcome.clone()).collect::<Vec<_>>();
            assert!(outcomes.is_empty() || outcomes == found, "modes differ in their plan");
            outcomes = found;
        }
        outcomes
    }
}

fn reused(delta: i32) -> Outcome {
    Outcome::Segment { delta, source: SegmentSource::Request, exact: true, own: true }
}

/// Of a text that does not agree with the segment from its first token on.
fn foreign(delta: i32) -> Outcome {
    Outcome::Segment { delta, source: SegmentSource::Request, exact: true, own: false }
}

fn missed(reason: MissReason) -> Outcome {
    Outcome::Recompute { reason }
}

#[test]
fn a_segment_cached_alone_is_found_at_any_offset_with_its_tail() {
    let mut world = world(HashKind::Xxh3_128);
    let segment = text(100, 11);
    world.learn(&segment, "");
    for before in 1..9 {
        assert_eq!(world.find(before, &segment, ""), [reused(before as i32)]);
    }
}

#[test]
fn a_segment_shorter_than_a_block_is_found_or_says_so() {
    let mut world = world(HashKind::Xxh3_128);
    world.learn(&text(100, 3), "");
    assert_eq!(world.find(5, &text(100, 3), ""), [reused(5)]);
    assert_eq!(world.find(5, &text(100, 2), ""), [missed(MissReason::ShorterThanBlock)]);
    assert_eq!(world.find(5, &text(500, 1), ""), [missed(MissReason::ShorterThanBlock)]);
}

#[test]
fn a_donor_on_another_grid_gives_head_middle_and_tail() {
    let mut world = world(HashKind::Xxh3_128);
    // The text begins at slot 2 of a block and ends inside one.
    let mut donor = text(700, 6);
    donor.extend(text(100, 13));
    donor.extend(text(600, 9));
    world.learn(&donor, "");
    for before in 1..9 {
        assert_eq!(world.find(before, &text(100, 13), ""), [reused(before as i32 - 6)]);
    }
}

#[test]
fn what_differs_is_recomputed_and_says_where() {
    let mut world = world(HashKind::Xxh3_128);
    world.learn(&text(100, 12), "");
    let mut segment = text(500, 2);
    segment.extend(text(104, 8));
    segment.extend(text(520, 3));
    let expected =
        [missed(MissReason::MisalignedStart), foreign(-2 + 5), missed(MissReason::TailNotCached)];
    assert_eq!(world.find(5, &segment, ""), expected);
    assert_eq!(world.find(5, &text(300, 12), ""), [missed(MissReason::NotCached)]);
}

#[test]
fn a_prefix_may_end_inside_a_block() {
    let mut world = world(HashKind::Xxh3_128);
    world.learn(&text(100, 11), "");
    for shared in 1..=11 {
        let mut tokens = text(100, shared);
        tokens.extend(text(5000, 4));
        let request = world.admit(&Admission::new(&tokens));
        assert_eq!(request.plan().prefix_tokens(), shared as usize);
        assert_eq!(world.cache.lookup_prefix(&tokens, ""), shared as usize);
    }
    let again = world.admit(&Admission::new(&text(100, 11)));
    assert_eq!(again.plan().prefix_tokens(), 10, "the last token is always computed");
}

#[test]
fn unmarked_text_is_discovered() {
    let mut world = world(HashKind::Xxh3_128);
    let mut donor = text(700, 5);
    donor.extend(text(100, 14));
    world.learn(&donor, "");
    let mut tokens = text(3000, 7);
    tokens.extend(text(100, 14));
    tokens.extend(text(4000, 6));
    let request = world.admit(&Admission { discover: true, ..Admission::new(&tokens) });
    let spans: Vec<_> = request.plan().spans.iter().map(|s| (s.start, s.end)).collect();
    assert_eq!(spans, [(0, 7), (7, 21), (21, 26), (26, 27)]);
    assert_eq!(request.plan().spans[1].outcome, foreign(2));
    let silent = world.admit(&Admission::new(&tokens));
    assert_eq!(silent.plan().segment_tokens(), 0);
}

#[test]
fn generated_text_is_a_donor_too() {
    let mut world = world(HashKind::Xxh3_128);
    let prompt = text(100, 6);
    let mut request = world.admit(&Admission::new(&prompt));
    request.commit(6, 6).unwrap();
    for token in text(200, 9) {
        request.append(&[token]).unwrap();
        let at = [request.len() as i32 - 1];
        world.arena.write(&world.cache, &request, &at, None);
    }
    request.commit(15, 15).unwrap();
    world.arena.verify(&world.cache, &request, tokens_of(&request));
    assert!(request.slots(&[14]).is_err(), "a committed position was writable");
    drop(request);
    assert_eq!(world.find(3, &text(200, 9), ""), [reused(-3)]);
}

#[test]
fn approximate_kv_is_a_donor_but_never_a_prefix() {
    let mut world = world(HashKind::Xxh3_128);
    let tokens = text(100, 12);
    let mut request = world.admit(&Admission::new(&tokens));
    request.commit(12, 6).unwrap();
    drop(request);
    assert_eq!(world.cache.lookup_prefix(&tokens, ""), 6);
    let approximate =
        Outcome::Segment { delta: 3 - 8, source: SegmentSource::Request, exact: false, own: true };
    assert_eq!(world.find(3, &text(108, 4), ""), [approximate]);
    let mut exact = world.admit(&Admission::new(&tokens));
    exact.commit(12, 12).unwrap();
    drop(exact);
    assert_eq!(world.find(3, &text(108, 4), ""), [reused(3 - 8)], "exact is preferred");
}

#[test]
fn namespaces_never_meet_and_count_the_same() {
    let segment = text(100, 12);
    let run = |other_has_it: bool, hash: HashKind| {
        let mut world = world(hash);
        if other_has_it {
            world.learn(&segment, "other");
        } else {
            world.learn(&text(900, 12), "other");
        }
        let before = world.cache.stats().counters;
        let outcomes = world.find(5, &segment, "mine");
        assert_eq!(world.cache.lookup_prefix(&segment, ""), 0);
        let request = world.admit(&Admission {
            discover: true,
            namespace: "mine",
            ..Admission::new(&segment)
        });
        let after = world.cache.stats().counters;
        (outcomes, request.plan().clone(), before.misses, after)
    };
    for hash in [HashKind::Xxh3_128, HashKind::Sha256, HashKind::Truncated { bits: 0 }] {
        assert_eq!(run(true, hash), run(false, hash));
        assert_eq!(run(true, hash).0, [missed(MissReason::NotCached)]);
    }
}

#[test]
fn colliding_digests_never_serve_foreign_tokens() {
    let mut world = world(HashKind::Truncated { bits: 0 });
    for from in [100, 200, 300] {
        world.learn(&text(from, 11), "");
    }
    for from in [100, 200, 300] {
        assert_eq!(world.find(6, &text(from, 11), ""), [reused(6)]);
        assert_eq!(world.cache.lookup_prefix(&text(from, 11), ""), 11);
    }
    assert_eq!(world.find(6, &text(400, 8), ""), [missed(MissReason::HashCollision)]);
}

#[test]
fn regimes_of_rope_never_meet() {
    let mut world = world(HashKind::Xxh3_128);
    let tokens = text(100, 12);
    world.learn(&tokens, "");
    let request = world.admit(&Admission { regime: 7, discover: true, ..Admission::new(&tokens) });
    assert_eq!(request.plan().recomputed_tokens(), 12);
    assert_eq!(world.cache.lookup_prefix_in(&tokens, "", 7), 0);
}

#[test]
fn a_marked_segment_that_missed_is_learnt_in_its_namespace() {
    let mut world = world(HashKind::Xxh3_128);
    let mut tokens = text(5000, 4);
    tokens.extend(text(100, 12));
    tokens.extend(text(6000, 2));
    let marked = [MarkedSegment { start: 4, end: 16, namespace: "kb" }];
    let mut request = world.admit(&Admission { marked: &marked, ..Admission::new(&tokens) });
    request.commit(18, 18).unwrap();
    drop(request);
    assert_eq!(world.find(7, &text(100, 12), "kb"), [reused(3)]);
    assert_eq!(world.find(7, &text(100, 12), ""), [missed(MissReason::NotCached)]);
}

#[test]
fn what_a_reader_may_not_publish_is_learnt_in_his_own_namespace() {
    let mut world = world(HashKind::Xxh3_128);
    world.learn(&text(100, 8), "kb");
    let mut tokens = text(5000, 4);
    tokens.extend(text(100, 16));
    tokens.extend(text(6000, 2));
    let marked = [MarkedSegment { start: 4, end: 20, namespace: "kb" }];
    let reader = Admission { namespace: "reader", publish: false, ..Admission::new(&tokens) };
    for mode in [Mode::Materialise, Mode::Share] {
        let mut request = world.admit(&Admission { marked: &marked, mode, ..reader });
        assert!(request.plan().recomputed_tokens() <= 14, "what the owner has is read");
        let mut fork = request.fork().unwrap();
        request.commit(22, 22).unwrap();
        fork.commit(22, 22).unwrap();
    }
    assert_eq!(world.cache.lookup_segment(&text(100, 16), "kb", 0), 8);
    assert_eq!(world.cache.lookup_segment(&text(108, 8), "kb", 0), 0);
    assert_eq!(world.cache.lookup_segment(&text(108, 8), "reader", 0), 8);
    world.cache.check().unwrap();
}

#[test]
fn share_mode_copies_only_the_blocks_that_are_rewritten() {
    let mut world = world(HashKind::Xxh3_128);
    world.learn(&text(100, 16), "");
    let mut tokens = text(5000, 2);
    tokens.extend(text(100, 16));
    tokens.extend(text(6000, 2));
    let marked = [MarkedSegment { start: 2, end: 18, namespace: "" }];
    let admission = Admission { marked: &marked, mode: Mode::Share, ..Admission::new(&tokens) };
    let mut request = world.admit(&admission);
    assert_eq!(request.private_blocks(), 2);
    request.make_writable(&[9], None).unwrap();
    let copies = world.arena.settle(&world.cache, &mut request, &[]);
    assert_eq!(request.private_blocks(), 3);
    assert_eq!(copies.iter().map(|copy| copy[4]).sum::<i32>(), 4);
    assert!(copies.iter().all(|copy| copy[5] == 2));
    world.arena.write(&world.cache, &request, &[9], None);
    world.arena.verify(&world.cache, &request, tokens_of(&request));
    request.make_writable(&[8, 11], None).unwrap();
    assert!(request.take_copies().is_empty());
    assert!(request.slots(&[12]).is_err(), "a donor position was writable");
}

#[test]
fn a_chain_does_not_go_on_below_a_block_that_now_holds_other_text() {
    let shape = KvShape::new(1, 1, 8, 4, KvDtype::F32).unwrap();
    let config = CacheConfig::new(shape, 0).sized_for(13).unwrap();
    let cache = KvCache::new(config).unwrap();
    let prompt = text(100, 8);
    let admission = Admission { reserve_tokens: 4, ..Admission::new(&prompt) };
    let mut first = cache.admit(&Admission::new(&prompt)).unwrap();
    let mut second = cache.admit(&admission).unwrap();
    first.commit(8, 8).unwrap();
    drop(first);
    // The second request's prefix is known by the first one's blocks, which it does not hold.
    second.commit(8, 8).unwrap();
    let other = text(1000, 40);
    let mut third = cache.admit(&Admission::new(&other)).unwrap();
    third.commit(40, 40).unwrap();
    assert_eq!(cache.stats().evictions, 2);
    second.append(&text(500, 4)).unwrap();
    second.commit(12, 12).unwrap();
    for blocks in 1..=10 {
        let mut tokens = other[..4 * blocks].to_vec();
        tokens.extend(text(500, 4));
        assert_eq!(cache.lookup_prefix(&tokens, ""), 4 * blocks);
    }
    let mut tokens = prompt.clone();
    tokens.extend(text(500, 4));
    assert_eq!(cache.lookup_prefix(&tokens, ""), 12, "its own blocks took the place");
    cache.check().unwrap();
}

#[test]
fn same_inputs_same_plan() {
    let build = || {
        let mut world = world(HashKind::Xxh3_128);
        for from in [100, 107, 300, 102] {
            world.learn(&text(from, 23), "");
        }
        let mut tokens = text(5000, 3);
        tokens.extend(text(105, 30));
        let admission = Admission { discover: true, ..Admission::new(&tokens) };
        let mut request = world.cache.admit(&admission).unwrap();
        (request.plan().clone(), request.take_copies(), request.entries())
    };
    assert_eq!(build(), build());
}
