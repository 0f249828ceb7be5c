//! The fast ops against their definition on random requests of every kind.

use crate::paged::{Backend, Case, Cpu, LAYERS, POISON, Random, Reference, World, assert_close};
use half::{bf16, f16};
use kvweave_core::ops::{
    BoundValues, Cached, CopyRerotate, CopySource, Element, Fp8Bounds, Fp8E4m3, HeadRows, KvScales,
    MergeStates, OpError, PageBounds, PageGeometry, PageScore, Reach, WritePages, fp8_vectors,
};
use proptest::prelude::*;

pub fn cases() -> impl Strategy<Value = Case> {
    let shape = (
        prop::sample::select(vec![8usize, 64, 72, 80, 96, 128, 256]),
        1usize..4,
        1usize..17,
        prop::sample::select(vec![8usize, 16, 32, 64]),
    );
    let requests = prop::collection::vec((0usize..200, 0usize..14), 1..4);
    let scoring = (
        prop::option::of(1u32..150),
        prop::option::of(prop::sample::select(vec![0.5f32, 5.0, 50.0])),
        any::<bool>(),
    );
    let deltas = prop::sample::select(vec![
        vec![0],
        vec![0, 7],
        vec![-3, 0, 1000, 1_000_000],
        vec![-1_000_000, 5],
        vec![i32::MAX, i32::MIN, 0],
    ]);
    (any::<u64>(), shape, requests, scoring, deltas, any::<bool>()).prop_map(
        |(seed, shape, requests, scoring, deltas, ragged)| Case {
            seed,
            head_dim: shape.0,
            kv_heads: shape.1,
            group: shape.2,
            page_tokens: shape.3,
            lens: requests.iter().map(|r| r.0).collect(),
            rows: requests.iter().map(|r| r.1).collect(),
            window: scoring.0,
            softcap: scoring.1,
            interleaved: scoring.2,
            deltas,
            ragged,
        },
    )
}

const SLACK: f32 = 2e-5;

fn prefill<T: Element, C: Element>(case: &Case) {
    let world = World::<T, C>::new(case);
    let (expected, expected_lse) = world.prefill::<Reference>();
    let (out, lse) = world.prefill::<Cpu>();
    assert_close(&lse, &expected_lse, SLACK, "lse");
    assert_close(&out, &expected, SLACK, "out");
    assert!(out.iter().all(|x| x.to_f32().is_finite()), "nothing unread leaks");
}

fn decode<T: Element, C: Element>(case: &Case) {
    let rows = vec![1; case.lens.len()];
    let world = World::<T, C>::new(&Case { rows, ..case.clone() });
    let (expected, expected_lse) = world.decode::<Reference>();
    let (out, lse) = world.decode::<Cpu>();
    assert_close(&lse, &expected_lse, SLACK, "lse");
    assert_close(&out, &expected, SLACK, "out");
}

fn score<T: Element, C: Element>(case: &Case) {
    let (lens, rows) = (case.lens[..1].to_vec(), case.rows[..1].to_vec());
    let world = World::<T, C>::new(&Case { lens, rows, ..case.clone() });
    assert_close(&world.score::<Cpu>(), &world.score::<Reference>(), SLACK, "mass");
}

fn merge<T: Element>(case: &Case) {
    let mut random = Random(case.seed);
    let (splits, states, head_dim) = (1 + random.below(5), random.below(200), case.head_dim);
    let outs: Vec<T> = random.values(splits * states * head_dim);
    let mut lse = |_| match random.below(4) {
        0 => f32::NEG_INFINITY,
        _ => 50.0 * random.unit(),
    };
    let lses: Vec<f32> = (0..splits * states).map(&mut lse).collect();
    let merged = |run: fn(MergeStates<'_, T>) -> _| {
        let mut out = vec![T::from_f32(POISON); states * head_dim];
        let mut lse = vec![POISON; states];
        let params = MergeStates {
            outs: &outs,
            lses: &lses,
            splits,
            states,
            head_dim,
            out: &mut out,
            lse: &mut lse,
        };
        Result::<(), kvweave_core::ops::OpError>::expect(run(params), "valid params");
        (out, lse)
    };
    let (expected, expected_lse) = merged(Reference::merge_states);
    let (out, lse) = merged(Cpu::merge_states);
    assert_close(&lse, &expected_lse, SLACK, "lse");
    assert_close(&out, &expected, SLACK, "out");
}

fn write<T: Element, C: Cached<T>>(case: &Case) {
    let mut world = World::<T, C>::new(case);
    let mut random = Random(case.seed);
    let mut slots: Vec<[i32; 2]> =
        world.entries.iter().flat_map(|e| (e[1]..e[2]).map(move |slot| [e[0], slot])).collect();
    random.shuffle(&mut slots);
    let (rows, heads, dim) = (slots.len(), case.kv_heads, case.head_dim);
    let keys: Vec<T> = random.values(rows * heads * dim);
    let values: Vec<T> = random.values(rows * heads * dim);
    // NaN = NaN for this comparison: the untouched slots are NaN on both sides.
    world.cache.iter_mut().for_each(|x| *x = C::from_f32(POISON));
    let held: Vec<[i32; 3]> = world.entries.iter().map(|e| [e[0], e[1], e[2]]).collect();
    let pages = world.cache.len() / world.geometry.head_stride;
    // Bounds where pages are, or elsewhere and in another order.
    let apart = (world.layer + 1) * heads;
    let mut elsewhere: Vec<i32> = (0..held.len()).map(|i| (i * heads) as i32).collect();
    random.shuffle(&mut elsewhere);
    let moved = random.below(2) == 0 && held.len() * heads + apart <= pages;
    let elsewhere = moved.then_some(&elsewhere[..]);
    let written = |run: fn(WritePages<'_, T, C>) -> Result<(), _>, kept: BoundValues<'_>| {
        let mut cache = world.cache.clone();
        let params = WritePages {
            cache: &mut cache,
            geometry: world.geometry,
            layer: world.layer,
            scales: world.scales,
            keys: HeadRows::contiguous(&keys, rows, heads, dim),
            values: HeadRows::contiguous(&values, rows, heads, dim),
            slots: &slots,
            reach: None,
            bounds: Some(PageBounds { values: kept, held: &held, rows: elsewhere }),
        };
        Result::<(), kvweave_core::ops::OpError>::expect(run(params), "valid params");
        cache
    };
    let exact = |run| {
        let mut bounds = vec![POISON; pages * 3 * dim];
        (written(run, BoundValues::F32(&mut bounds)), bounds)
    };
    let (cache, bounds) = exact(Reference::write_pages);
    assert!((cache, bounds.clone()) == exact(Cpu::write_pages));
    let named = bounds.iter().filter(|&&x| x != POISON).count();
    assert_eq!(named, held.len() * heads * 3 * dim);
    for score in [PageScore::MinMax, PageScore::Mean] {
        let rounded = |run| {
            let mut numbers = vec![Fp8E4m3::default(); pages * fp8_vectors(score) * dim];
            let mut scales = vec![0; pages];
            let values = Fp8Bounds { score, numbers: &mut numbers[..], scales: &mut scales[..] };
            written(run, BoundValues::Fp8(values));
            (numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), scales)
        };
        let (numbers, scales) = rounded(Reference::write_pages);
        assert!((numbers, scales.clone()) == rounded(Cpu::write_pages));
        // Every scale that was written is at least the least, which is no 0.
        assert_eq!(scales.iter().filter(|&&bits| bits > 0).count(), held.len() * heads);
    }
}

/// Two tables whose blocks have a page for each of their heads and others between; some tokens are
/// kept by one of them only.
fn write_heads<T: Element, C: Cached<T>>(case: &Case) {
    let mut random = Random(case.seed);
    let (heads, dim, page) = (case.kv_heads, case.head_dim, case.page_tokens);
    let rows = random.below(80);
    let tables: Vec<usize> = (0..heads).map(|_| random.below(2)).collect();
    let rank = |g: usize| 2 * tables[..g].iter().filter(|&&table| table == tables[g]).count() + 1;
    let reach: Vec<[i32; 4]> =
        (0..heads).map(|g| [tables[g] as i32, rank(g) as i32, g as i32, 1]).collect();
    let pages = 2 * heads + 2;
    let mut slots = vec![[-1, -1]; 2 * rows];
    let mut blocks: Vec<usize> = (0..2 * rows.div_ceil(page)).map(|b| 1 + b * pages).collect();
    random.shuffle(&mut blocks);
    for (i, slot) in slots.iter_mut().enumerate().filter(|_| random.below(4) > 0) {
        let (table, row) = (i / rows, i % rows);
        *slot = [blocks[2 * (row / page) + table] as i32, (row % page) as i32];
    }
    let geometry = PageGeometry::arena(1, heads, page, dim);
    let scales = if C::QUANTISED { KvScales { key: 0.3, value: 2.0 } } else { KvScales::ONE };
    let (keys, values): (Vec<T>, Vec<T>) =
        (random.values(rows * heads * dim), random.values(rows * heads * dim));
    let written = |run: fn(WritePages<'_, T, C>) -> Result<(), OpError>| {
        let len = (1 + blocks.len() * pages) * geometry.block_stride;
        let mut cache = vec![C::from_f32(POISON); len];
        let params = WritePages {
            cache: &mut cache,
            geometry,
            layer: 0,
            scales,
            keys: HeadRows::contiguous(&keys, rows, heads, dim),
            values: HeadRows::contiguous(&values, rows, heads, dim),
            slots: &slots,
            reach: Some(Reach { tables: 2, heads: &reach }),
            bounds: None,
        };
        run(params).expect("valid params");
        cache
    };
    let cache = written(Reference::write_pages);
    assert!(cache == written(Cpu::write_pages));
    let kept = |g: usize| slots[tables[g] * rows..][..rows].iter().filter(|s| s[0] > 0).count();
    let expected: usize = (0..heads).map(kept).sum();
    let touched = cache.iter().filter(|x| x.to_f32() != C::from_f32(POISON).to_f32()).count();
    assert_eq!(touched, expected * 2 * dim);
}

/// Copies from half of a world's blocks to the others.
fn random_copies<T>(world: &World<T>, case: &Case, random: &mut Random) -> Vec<[i32; 6]> {
    let page = case.page_tokens;
    let half = world.entries.len() / 2;
    let run = |(from, to): (&[i32; 5], &[i32; 5])| {
        let (src, dst) = (random.below(page), random.below(page));
        let count = 1 + random.below(page - src.max(dst));
        let delta = case.deltas[random.below(case.deltas.len())];
        [from[0], src as i32, to[0], dst as i32, count as i32, delta]
    };
    world.entries[..half].iter().zip(&world.entries[half..]).map(run).collect()
}

/// What copies read, in pages of more tokens.
fn repaged<T: Element>(world: &World<T>, copies: &[[i32; 6]]) -> (Vec<T>, PageGeometry) {
    let read = world.geometry;
    let wide = PageGeometry::arena(read.layers, read.kv_heads, read.page_tokens + 3, read.head_dim);
    let last = copies.iter().map(|copy| copy[0] as usize).max().unwrap_or(0);
    let end = wide.key_offset(last, read.layers - 1, read.kv_heads, 0);
    let mut pages = vec![T::from_f64(77.0); end];
    for copy in copies {
        let (block, first) = (copy[0] as usize, copy[1] as usize);
        for page in 0..read.layers * read.kv_heads {
            for slot in first..first + copy[4] as usize {
                for half in 0..2 {
                    let from = read.key_offset(block, 0, page, slot) + half * read.value_offset;
                    let to = wide.key_offset(block, 0, page, slot) + half * wide.value_offset;
                    let vector = &world.cache[from..from + read.head_dim];
                    pages[to..to + read.head_dim].copy_from_slice(vector);
                }
            }
        }
    }
    (pages, wide)
}

fn copy<T: Element>(case: &Case) {
    let mut world = World::<T>::new(case);
    let mut random = Random(case.seed);
    world.cache = random.values(world.cache.len());
    let copies = random_copies(&world, case, &mut random);
    let mut layers: Vec<i32> = (0..LAYERS * case.kv_heads).map(|i| (i % LAYERS) as i32).collect();
    random.shuffle(&mut layers);
    layers.truncate(1 + random.below(layers.len()));
    for layers in [None, Some(&layers[..])] {
        let copied = |run: fn(CopyRerotate<'_, T>) -> Result<(), OpError>, source| {
            let mut cache = world.cache.clone();
            let (geometry, rope) = (world.geometry, &world.rope);
            let copies = &copies;
            let params = CopyRerotate { cache: &mut cache, geometry, source, copies, rope, layers };
            run(params).expect("valid params");
            cache
        };
        let both =
            |source| (copied(Reference::copy_rerotate, source), copied(Cpu::copy_rerotate, source));
        let (expected, got) = both(None);
        assert_close(&got, &expected, 3e-7, "cache");
        let (pages, geometry) = repaged(&world, &copies);
        let (apart, got) = both(Some(CopySource { pages: &pages, geometry }));
        assert_close(&got, &apart, 3e-7, "cache, read from another tensor");
        assert_close(&apart, &expected, 0.0, "what was read there is what was read here");
        let rotated: usize = copies.iter().filter(|c| c[5] != 0).map(|c| c[4] as usize).sum();
        let moved = expected.iter().zip(&world.cache).filter(|(a, b)| a != b).count();
        let pages = layers.map_or(LAYERS * case.kv_heads, <[i32]>::len);
        let vectors = pages * case.head_dim;
        assert!(rotated == 0 || moved > rotated * vectors / 2, "keys and values were written");
        assert!(moved <= 2 * vectors * copies.iter().map(|c| c[4] as usize).sum::<usize>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn attend_prefill(case in cases()) {
        prefill::<f32, f32>(&case);
        prefill::<bf16, bf16>(&case);
        prefill::<f16, f16>(&case);
        prefill::<f32, Fp8E4m3>(&case);
        prefill::<bf16, Fp8E4m3>(&case);
    }

    #[test]
    fn attend_decode(case in cases()) {
        decode::<f32, f32>(&case);
        decode::<bf16, bf16>(&case);
        decode::<f16, f16>(&case);
        decode::<f32, Fp8E4m3>(&case);
        decode::<bf16, Fp8E4m3>(&case);
    }

    #[test]
    fn score_tokens(case in cases()) {
        score::<f32, f32>(&case);
        score::<bf16, bf16>(&case);
        score::<f16, f16>(&case);
        score::<f32, Fp8E4m3>(&case);
        score::<bf16, Fp8E4m3>(&case);
    }

    #[test]
    fn merge_states(case in cases()) {
        merge::<f32>(&case);
        merge::<bf16>(&case);
        merge::<f16>(&case);
    }

    #[test]
    fn write_pages(case in cases()) {
        write::<f32, f32>(&case);
        write::<bf16, bf16>(&case);
        write::<f16, f16>(&case);
        write::<f32, Fp8E4m3>(&case);
        write::<bf16, Fp8E4m3>(&case);
        write_heads::<f32, f32>(&case);
        write_heads::<f16, f16>(&case);
        write_heads::<f16, Fp8E4m3>(&case);
    }

    #[test]
    fn copy_rerotate(case in cases()) {
        copy::<f32>(&case);
        copy::<bf16>(&case);
        copy::<f16>(&case);
        copy::<Fp8E4m3>(&case);
    }
}

#[test]
fn decode_over_many_splits() {
    let case = Case {
        seed: 3,
        head_dim: 64,
        kv_heads: 2,
        group: 3,
        page_tokens: 16,
        lens: vec![3000, 1, 1500],
        rows: vec![1; 3],
        window: None,
        softcap: None,
        interleaved: false,
        deltas: vec![0, 9],
        ragged: true,
    };
    let mut world = World::<f32>::new(&case);
    world.positions = vec![2999, 0, 1499];
    let ((out, lse), (expected, expected_lse)) =
        (world.decode::<Cpu>(), world.decode::<Reference>());
    assert_close(&out, &expected, SLACK, "out");
    assert_close(&lse, &expected_lse, SLACK, "lse");
}
