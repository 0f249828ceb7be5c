//! What the block manager costs, beside the figures of vLLM's `BlockPool` and `hash_block_tokens`.
//!
//! Every case reports nanoseconds a block through its throughput: elements are blocks.
//! Each case first checks that the answer is right.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvweave_core::content::{BlockHasher, HashKind};
use kvweave_core::pool::{Pool, Store, WritableBlocks};
use kvweave_core::{
    Admission, CacheConfig, KvCache, KvDtype, KvShape, MarkedSegment, Mode, Request, Reuse,
};

const PAGE: usize = 16;
const BLOCKS: usize = 8192;

fn prompt(seed: u32, blocks: usize) -> Vec<u32> {
    let tokens = (blocks * PAGE) as u32;
    (0..tokens).map(|i| (i ^ seed).wrapping_mul(2_654_435_761) % 50_000).collect()
}

fn cache(blocks: u64, hash: HashKind) -> KvCache {
    let shape = KvShape::new(30, 3, 64, PAGE as u32, KvDtype::Bf16).unwrap();
    let mut config = CacheConfig::new(shape, 0).sized_for(blocks).unwrap();
    config.hash = hash;
    KvCache::new(config).unwrap()
}

fn filled(tokens: &[u32], hash: HashKind) -> KvCache {
    let cache = cache(2 * BLOCKS as u64, hash);
    let mut request = cache.admit(&Admission::new(tokens)).unwrap();
    request.commit(tokens.len(), tokens.len()).unwrap();
    drop(request);
    assert_eq!(cache.lookup_prefix(tokens, ""), tokens.len());
    cache
}

fn allocate_and_free(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate_and_free");
    let pool = Pool::new(90 * 8193, None, &[90]).unwrap();
    let store = Arc::new(Store::new(pool, ()));
    for blocks in [1, 16, 256, 4096] {
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_function(BenchmarkId::from_parameter(blocks), |b| {
            b.iter(|| drop(black_box(WritableBlocks::allocate(&store, &[blocks]).unwrap())));
        });
    }
    group.finish();
    store.lock().pool.check().unwrap();
}

fn register(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate_complete_register_first_touch");
    for blocks in [16, 256, 4096] {
        let tokens = prompt(7, blocks);
        let admission = Admission { reuse: Reuse::None, ..Admission::new(&tokens) };
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_function(BenchmarkId::from_parameter(blocks), |b| {
            b.iter_batched_ref(
                || (cache(blocks as u64 + 1, HashKind::Xxh3_128), None),
                |(cache, kept)| {
                    let mut request = cache.admit(&admission).unwrap();
                    request.commit(tokens.len(), tokens.len()).unwrap();
                    *kept = Some(request);
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

/// The steady state of a busy cache: every block that is registered evicts another.
fn register_evicting(c: &mut Criterion) {
    let mut group = c.benchmark_group("admit_register_evict_drop");
    for blocks in [16, 256, 4096] {
        let tokens: Vec<Vec<u32>> = (1..9).map(|seed| prompt(seed << 20, blocks)).collect();
        let cache = cache(2 * blocks as u64, HashKind::Xxh3_128);
        group.throughput(Throughput::Elements(blocks as u64));
        let mut turn = 0;
        group.bench_function(BenchmarkId::from_parameter(blocks), |b| {
            b.iter(|| {
                turn += 1;
                let tokens = &tokens[turn % tokens.len()];
                let mut request = cache.admit(&Admission::new(tokens)).unwrap();
                request.take_copies();
                request.commit(tokens.len(), tokens.len()).unwrap();
            });
        });
        cache.check().unwrap();
    }
    group.finish();
}

/// A cache in which every block of a prompt was last continued by something else, so that each
/// step of a lookup has to hash.
fn branching(tokens: &[u32], hash: HashKind) -> KvCache {
    let cache = cache(2 * BLOCKS as u64 + 1, hash);
    let commit = |tokens: &[u32]| {
        let mut request = cache.admit(&Admission::new(tokens)).unwrap();
        request.take_copies();
        request.commit(tokens.len(), tokens.len()).unwrap();
    };
    commit(tokens);
    for block in 0..BLOCKS {
        let mut other = tokens[..(block + 1) * PAGE].to_vec();
        let last = other.len() - 1;
        other[last] = 60_000;
        commit(&other);
    }
    assert_eq!(cache.lookup_prefix(tokens, ""), tokens.len());
    cache
}

fn lookup(c: &mut Criterion) {
    let mut group = c.benchmark_group("lookup");
    let tokens = prompt(3, BLOCKS);
    let cache = filled(&tokens, HashKind::Xxh3_128);
    let digests = cache.prefix_digests(&tokens, "", 0);
    let held = cache.admit(&Admission::new(&tokens)).unwrap();
    for blocks in [1, 64, 512, BLOCKS] {
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_function(BenchmarkId::new("active_hashed_before", blocks), |b| {
            b.iter(|| {
                let found = cache.lookup_digests(&digests[..blocks], &tokens, "", 0);
                assert_eq!(found, blocks);
            });
        });
    }
    let admission = Admission { mode: Mode::Share, ..Admission::new(&tokens) };
    group.bench_function("admit_and_drop_active/8192", |b| {
        b.iter(|| black_box(cache.admit(&admission).unwrap()));
    });
    drop(held);
    group.bench_function("admit_and_drop_inactive/8192", |b| {
        b.iter(|| black_box(cache.admit(&admission).unwrap()));
    });
    for (name, hash) in [("xxh3-128", HashKind::Xxh3_128), ("sha256", HashKind::Sha256)] {
        for (case, cache) in
            [("chain", filled(&tokens, hash)), ("branching", branching(&tokens, hash))]
        {
            group.bench_function(format!("prefix_of_128k_tokens/{case}/{name}"), |b| {
                b.iter(|| assert_eq!(cache.lookup_prefix(&tokens, ""), tokens.len()));
            });
        }
    }
    group.finish();
}

fn hashing(c: &mut Criterion) {
    let mut group = c.benchmark_group("hash_128k_tokens");
    let tokens = prompt(5, BLOCKS);
    group.throughput(Throughput::Elements(BLOCKS as u64));
    for (name, kind) in [("xxh3-128", HashKind::Xxh3_128), ("sha256", HashKind::Sha256)] {
        let hasher = BlockHasher::new(kind, 0, PAGE);
        group.bench_function(name, |b| {
            b.iter(|| {
                let root = hasher.root("", 0, "");
                let chunks = black_box(&tokens).chunks_exact(PAGE);
                chunks.fold(root, |parent, tokens| hasher.chain(parent, tokens))
            });
        });
    }
    group.finish();
}

fn discovery(c: &mut Criterion) {
    let mut group = c.benchmark_group("discover");
    let tokens = prompt(3, BLOCKS);
    let cache = filled(&tokens, HashKind::Xxh3_128);
    let other = prompt(1 << 24, 1024);
    let admission = Admission { discover: true, mode: Mode::Share, ..Admission::new(&other) };
    group.throughput(Throughput::Elements(other.len() as u64));
    group.bench_function("16k_tokens_without_a_hit", |b| {
        b.iter(|| black_box(cache.admit(&admission).unwrap()));
    });
    group.finish();
}

/// Consecutive numbers as tokens, so that no two texts share a block.
fn text(from: u32, blocks: usize) -> Vec<u32> {
    (from..from + (blocks * PAGE) as u32).collect()
}

fn learnt(cache: &KvCache, tokens: &[u32]) -> Request {
    let mut request = cache.admit(&Admission::new(tokens)).unwrap();
    request.commit(tokens.len(), tokens.len()).unwrap();
    request
}

/// A cache of 20 000 blocks whose pool of frozen text yields above so many percent.
fn yielding(watermark: u8) -> KvCache {
    let shape = KvShape::new(1, 1, 8, PAGE as u32, KvDtype::F32).unwrap();
    let config = CacheConfig::new(shape, 0).sized_for(20_000).unwrap();
    KvCache::new(CacheConfig { watermark, ..config }).unwrap()
}

/// What a call costs does not grow with what knowledge bases have had to give up.
fn beside_absent_blocks(c: &mut Criterion) {
    let mut group = c.benchmark_group("admit_commit_drop_beside_absent_blocks");
    for absent in [0, 10_000] {
        let cache = yielding(90);
        if absent > 0 {
            let book = text(1, absent);
            learnt(&cache, &book).freeze("book", 0..book.len()).unwrap();
            drop(learnt(&cache, &text(1_000_000, 20_000)));
        }
        assert_eq!(cache.stats().frozen_absent, absent);
        let mut from = 10_000_000;
        group.bench_function(BenchmarkId::from_parameter(absent), |b| {
            b.iter(|| {
                from += 2 * PAGE as u32;
                drop(black_box(learnt(&cache, &text(from, 2))));
            });
        });
        assert_eq!(cache.stats().frozen_absent, absent);
    }
    group.finish();
}

/// Nor with what they hold, where all of it is read and none can yield: a token more of a request.
fn above_the_watermark(c: &mut Criterion) {
    const BOOK: usize = 10_000;
    let mut group = c.benchmark_group("append_above_the_watermark");
    for held in [0, BOOK] {
        let cache = yielding(40);
        let book = text(1, BOOK);
        let asked = [&book[..], &[7; PAGE]].concat();
        let marked = [MarkedSegment { start: 0, end: book.len(), namespace: "" }];
        let reader = (held > 0).then(|| {
            learnt(&cache, &book).freeze("book", 0..book.len()).unwrap();
            let admission =
                Admission { marked: &marked, mode: Mode::Share, ..Admission::new(&asked) };
            cache.admit(&admission).unwrap()
        });
        assert_eq!(cache.stats().frozen_blocks, held, "what is read does not yield");
        group.throughput(Throughput::Elements(8 * PAGE as u64));
        group.bench_function(BenchmarkId::from_parameter(held), |b| {
            b.iter_batched_ref(
                || cache.admit(&Admission::new(&text(5_000_000, 1))).unwrap(),
                |writer| {
                    for token in 0..8 * PAGE as u32 {
                        writer.append(&[token]).unwrap();
                    }
                },
                BatchSize::PerIteration,
            );
        });
        drop(reader);
    }
    group.finish();
}

criterion_group!(
    benches,
    allocate_and_free,
    register,
    register_evicting,
    lookup,
    hashing,
    discovery,
    beside_absent_blocks,
    above_the_watermark
);
criterion_main!(benches);
