//! Speed of the ops at SmolLM2-135M's shape (H 9, G 3, D 64, P 16) and one 8B shape.
//!
//! Prefill, scattered and scoring benches count FLOP as 4·D (2·D for a pass without values) per
//! visible (row, head, key); divide by the reported time. Copies count bytes read and written.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvweave_core::ops::{
    AttendDecode, AttendPrefill, CopyRerotate, HeadRows, KvScales, KvView, PageGeometry, Pairing,
    Queries, RopeTable, ScoreTokens, Scoring,
};

const P: usize = 16;

struct Bench {
    geometry: PageGeometry,
    heads: usize,
    cache: Vec<f32>,
    entries: Vec<[i32; 5]>,
    rope: RopeTable,
}

impl Bench {
    fn new(tokens: usize, layers: usize, heads: usize, kv_heads: usize, dim: usize) -> Self {
        let geometry = PageGeometry::arena(layers, kv_heads, P, dim);
        let group_pages = layers * kv_heads;
        let blocks = tokens / P;
        let cache = noise((blocks + 1) * group_pages * geometry.block_stride);
        let entries = (0..blocks)
            .map(|b| [((b + 1) * group_pages) as i32, 0, P as i32, (b * P) as i32, 0])
            .collect();
        let freq = (0..dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / dim as f32));
        let freq = freq.collect::<Vec<_>>().repeat(layers);
        let rope = RopeTable::new(freq, layers, Pairing::Half).expect("a valid table");
        Self { geometry, heads, cache, entries, rope }
    }

    fn kv(&self) -> KvView<'_, f32> {
        let (cache, geometry, entries) = (&self.cache[..], self.geometry, &self.entries[..]);
        KvView { cache, geometry, layer: 0, entries, reach: None, scales: KvScales::ONE }
    }

    fn scoring(&self) -> Scoring<'_> {
        Scoring { scale: 0.125, rope: &self.rope, window: None, softcap: None }
    }

    fn queries<'a>(&self, q: &'a [f32], positions: &'a [i32]) -> Queries<'a, f32> {
        let (rows, dim) = (positions.len(), self.geometry.head_dim);
        Queries { vectors: HeadRows::contiguous(q, rows, self.heads, dim), positions }
    }

    fn visible(&self, positions: &[i32]) -> u64 {
        positions.iter().map(|&p| p as u64 + 1).sum::<u64>() * self.heads as u64
    }
}

fn noise(len: usize) -> Vec<f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn prefill(c: &mut Criterion) {
    let mut group = c.benchmark_group("attend_prefill");
    group.sample_size(10);
    for (name, tokens, step, shape) in [
        ("dense 2K", 2048, 1, (9, 3, 64)),
        ("dense 4K", 4096, 1, (9, 3, 64)),
        ("scattered 10% of 4K", 4096, 10, (9, 3, 64)),
        ("scattered 5% of 4K", 4096, 20, (9, 3, 64)),
        ("dense 2K, D 128", 2048, 1, (8, 2, 128)),
    ] {
        let bench = Bench::new(tokens, 1, shape.0, shape.1, shape.2);
        let positions: Vec<i32> = (0..tokens as i32).step_by(step).collect();
        let rows = positions.len();
        let q = noise(rows * shape.0 * shape.2);
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; rows * shape.0]);
        let (row_offsets, entry_offsets) = ([0, rows as i32], [0, bench.entries.len() as i32]);
        let flop = bench.visible(&positions) * 4 * shape.2 as u64;
        group.throughput(Throughput::Elements(flop));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                kvweave_cpu::attend_prefill(AttendPrefill {
                    queries: bench.queries(&q, &positions),
                    kv: bench.kv(),
                    scoring: bench.scoring(),
                    row_offsets: &row_offsets,
                    entry_offsets: &entry_offsets,
                    out: &mut out,
                    lse: &mut lse,
                })
                .expect("valid params");
                black_box(&out);
            });
        });
    }
    group.finish();
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("attend_decode");
    group.sample_size(20);
    for (name, tokens, shape) in
        [("B 1, 4K", 4096, (9, 3, 64)), ("B 1, 32K, 8B shape", 32_768, (32, 8, 128))]
    {
        let bench = Bench::new(tokens, 1, shape.0, shape.1, shape.2);
        let q = noise(shape.0 * shape.2);
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; shape.0]);
        let (positions, entry_offsets) = ([tokens as i32 - 1], [0, bench.entries.len() as i32]);
        group.throughput(Throughput::Bytes((tokens * shape.1 * shape.2 * 2 * 4) as u64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                kvweave_cpu::attend_decode(AttendDecode {
                    queries: bench.queries(&q, &positions),
                    kv: bench.kv(),
                    scoring: bench.scoring(),
                    entry_offsets: &entry_offsets,
                    out: &mut out,
                    lse: &mut lse,
                })
                .expect("valid params");
                black_box(&out);
            });
        });
    }
    group.finish();
}

fn score(c: &mut Criterion) {
    let mut group = c.benchmark_group("score_tokens");
    group.sample_size(10);
    for (name, step) in [("dense 2K", 1), ("10% of 2K", 10)] {
        let bench = Bench::new(2048, 1, 9, 3, 64);
        let positions: Vec<i32> = (0..2048).step_by(step).collect();
        let q = noise(positions.len() * 9 * 64);
        let mut mass = vec![0.0; 2048];
        let entry_offsets = [0, bench.entries.len() as i32];
        group.throughput(Throughput::Elements(bench.visible(&positions) * 4 * 64));
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let (queries, kv) = (bench.queries(&q, &positions), bench.kv());
                let (scoring, mass) = (bench.scoring(), &mut mass[..]);
                let (entry_offsets, edge) = (&entry_offsets[..], None);
                let params = ScoreTokens { queries, kv, scoring, entry_offsets, mass, edge };
                kvweave_cpu::score_tokens(params).expect("valid params");
            });
        });
    }
    group.finish();
}

fn copy(c: &mut Criterion) {
    let mut group = c.benchmark_group("copy_rerotate");
    group.sample_size(10);
    let mut bench = Bench::new(2048, 30, 9, 3, 64);
    let pages = (bench.geometry.layers * bench.geometry.kv_heads) as i32;
    let bytes = 64 * pages as usize * bench.geometry.block_stride * 4;
    group.throughput(Throughput::Bytes(2 * bytes as u64));
    for (name, delta) in [("1K tokens, 30 layers", 1234), ("the same, delta 0", 0)] {
        let copies: Vec<[i32; 6]> =
            (1..65).map(|b| [b * pages, 0, (b + 64) * pages, 0, P as i32, delta]).collect();
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| {
                let (geometry, rope) = (bench.geometry, &bench.rope);
                let params = CopyRerotate {
                    cache: &mut bench.cache,
                    geometry,
                    source: None,
                    copies: &copies,
                    rope,
                    layers: None,
                };
                kvweave_cpu::copy_rerotate(params).expect("valid params");
            });
        });
    }
    let (source, mut target) = (vec![1.0f32; bytes / 4], vec![0.0f32; bytes / 4]);
    group.bench_function("memcpy, one thread", |b| {
        b.iter(|| {
            target.copy_from_slice(black_box(&source));
            black_box(&target);
        });
    });
    group.finish();
}

criterion_group!(benches, prefill, decode, score, copy);
criterion_main!(benches);
