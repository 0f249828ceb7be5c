//! What a call costs does not grow with what knowledge bases hold, or have had to give up.

use std::time::{Duration, Instant};

use kvweave_core::{
    Admission, CacheConfig, KvCache, KvDtype, KvShape, MarkedSegment, Mode, Request,
};

const PAGE: usize = 4;

fn cache(blocks: u64, watermark: u8) -> KvCache {
    let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
    let config = CacheConfig::new(shape, 0).sized_for(blocks).unwrap();
    KvCache::new(CacheConfig { watermark, ..config }).unwrap()
}

fn text(from: u32, blocks: usize) -> Vec<u32> {
    (from..from + (blocks * PAGE) as u32).collect()
}

fn learnt(cache: &KvCache, tokens: &[u32]) -> Request {
    let mut request = cache.admit(&Admission::new(tokens)).unwrap();
    request.commit(tokens.len(), tokens.len()).unwrap();
    request
}

/// The shortest of many runs: others share the machine.
fn shortest(mut run: impl FnMut(u32)) -> Duration {
    let mut timed = |round| {
        let start = Instant::now();
        run(round);
        start.elapsed()
    };
    (0..60).map(&mut timed).min().unwrap()
}

fn assert_flat(with: Duration, without: Duration) {
    let most = 8 * without + Duration::from_micros(40);
    assert!(with < most, "{with:?} with 10 000 blocks, {without:?} with none");
}

/// A prompt of two blocks, of which the index learns.
fn admit_and_commit(cache: &KvCache, round: u32) {
    drop(learnt(cache, &text(1_000_000 + 8 * round, 2)));
}

#[test]
fn admissions_with_ten_thousand_absent_blocks_are_flat() {
    let full = cache(20_000, 90);
    let book = text(1, 10_000);
    learnt(&full, &book).freeze("book", 0..book.len()).unwrap();
    drop(learnt(&full, &text(100_000, 20_000)));
    assert_eq!(full.stats().frozen_absent, 10_000);
    let empty = cache(20_000, 90);
    let [with, without] =
        [&full, &empty].map(|cache| shortest(|round| admit_and_commit(cache, round)));
    assert_eq!(full.stats().frozen_absent, 10_000);
    assert_flat(with, without);
    // Nor do those that are still cached, and wait for room, cost anything.
    let waiting = cache(20_000, 90);
    learnt(&waiting, &book).freeze("book", 0..book.len()).unwrap();
    let held = waiting.admit(&Admission::new(&text(100_000, 17_500))).unwrap();
    assert!(waiting.stats().frozen_absent > 9_000);
    assert_flat(shortest(|round| admit_and_commit(&waiting, round)), without);
    drop(held);
}

#[test]
fn appends_above_the_watermark_are_flat() {
    let full = cache(20_000, 40);
    let book = text(1, 10_000);
    learnt(&full, &book).freeze("book", 0..book.len()).unwrap();
    let asked = [&book[..], &[7; PAGE]].concat();
    let marked = [MarkedSegment { start: 0, end: book.len(), namespace: "" }];
    let admission = Admission { marked: &marked, mode: Mode::Share, ..Admission::new(&asked) };
    let reader = full.admit(&admission).unwrap();
    assert_eq!(full.stats().frozen_blocks, 10_000, "what is read does not yield");
    let empty = cache(20_000, 40);
    let append = |cache: &KvCache| {
        let mut writer = cache.admit(&Admission::new(&text(500_000, 1))).unwrap();
        shortest(|round| {
            for token in 0..2 * PAGE as u32 {
                writer.append(&[100 * round + token]).unwrap();
            }
        })
    };
    assert_flat(append(&full), append(&empty));
    drop(reader);
}
