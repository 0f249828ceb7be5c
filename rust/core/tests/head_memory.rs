//! What head groups save, what windows let go of, and that it serves others at once.

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
    let mut config = CacheConfig::new(shape, shape.pages_for_blocks(blocks).unwrap());
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
                prefill(&mut request, TOKENS.min(chunk.max(1)), commits);
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
    let dense = KvCache::new(CacheConfig::new(shape, shape.pages_for_blocks(blocks).unwrap()));
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
