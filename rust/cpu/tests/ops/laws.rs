//! Laws of attention and of moving keys, on every backend.

use crate::paged::{Backend, Case, World, assert_close};
use half::{bf16, f16};
use kvweave_core::ops::{
    CopyRerotate, Element, Fp8E4m3, HeadRows, KvScales, MergeStates, WritePages,
};

const SLACK: f32 = 2e-5;

fn case(seed: u64) -> Case {
    Case {
        seed,
        head_dim: 64,
        kv_heads: 2,
        group: 3,
        page_tokens: 16,
        lens: vec![180],
        rows: vec![20],
        window: None,
        softcap: None,
        interleaved: seed % 2 == 1,
        deltas: vec![0],
        ragged: true,
    }
}

fn copy<B: Backend, T: Element>(world: &mut World<T>, copies: &[[i32; 6]]) {
    let (geometry, rope) = (world.geometry, &world.rope);
    B::copy_rerotate(CopyRerotate {
        cache: &mut world.cache,
        geometry,
        source: None,
        copies,
        rope,
        layers: None,
    })
    .expect("valid params");
}

/// Law 4: reading in place with q rotated by −delta = copying with keys rotated by delta. The one
/// rounding of a materialised key moves a score by at most its relative size.
fn share_equals_materialise<B: Backend, T: Element>(slack: f32) {
    for seed in 0..6 {
        let deltas = vec![-40, 3, 1000, -1_000_000, 0];
        let shared = World::<T>::new(&Case { deltas, ..case(seed) });
        let mut copied = shared.clone();
        let pages = copied.geometry.layers * copied.geometry.kv_heads;
        let first = copied.cache.len() / copied.geometry.block_stride;
        copied.cache.resize(copied.cache.len() * 2, T::default());
        let mut copies = Vec::new();
        for (i, entry) in copied.entries.iter_mut().enumerate() {
            let [block, begin, end, _, delta] = *entry;
            let target = (first + i * pages) as i32;
            copies.push([block, begin, target, begin, end - begin, delta]);
            (entry[0], entry[4]) = (target, 0);
        }
        copy::<B, T>(&mut copied, &copies);
        assert_close(&copied.prefill::<B>().0, &shared.prefill::<B>().0, slack, "out");
        assert_close(&copied.score::<B>(), &shared.score::<B>(), 20.0 * slack, "mass");
    }
}

/// Law 4: RoPE at p then delta-RoPE by d = RoPE at p + d; out and back = where it was.
fn rotations_add<B: Backend, T: Element>(slack: f32) {
    for seed in 0..6 {
        let mut world = World::<T>::new(&case(seed));
        world.cache = crate::paged::Random(seed).values(world.cache.len());
        let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(|i| world.entries[i][0]);
        copy::<B, T>(&mut world, &[[a, 0, b, 0, 16, 700]]);
        copy::<B, T>(&mut world, &[[b, 0, c, 0, 16, -650], [a, 0, d, 0, 16, 50]]);
        copy::<B, T>(&mut world, &[[b, 0, e, 0, 16, -700]]);
        let elements = world.geometry.layers * world.geometry.layer_stride;
        let block = |number: i32| {
            let start = number as usize * world.geometry.block_stride;
            &world.cache[start..start + elements]
        };
        assert_close(block(c), block(d), slack, "700 − 650 = 50");
        assert_close(block(e), block(a), slack, "700 − 700 = 0");
        assert!(block(b) != block(a), "a turn moves keys");
    }
}

/// delta = 0 copies every bit, NaN payloads included; what is not named stays.
fn copies_are_exact<B: Backend, T: Element>() {
    let mut world = World::<T>::new(&case(1));
    world.cache = crate::paged::Random(5).values(world.cache.len());
    let before = world.cache.clone();
    let (from, to) = (world.entries[0][0], world.entries[1][0]);
    copy::<B, T>(&mut world, &[[from, 3, to, 7, 5, 0]]);
    let mut expected = before.clone();
    let geometry = world.geometry;
    for layer in 0..geometry.layers {
        for head in 0..geometry.kv_heads {
            for i in 0..5 {
                let source = geometry.key_offset(from as usize, layer, head, 3 + i);
                let target = geometry.key_offset(to as usize, layer, head, 7 + i);
                for part in [0, geometry.value_offset] {
                    expected.copy_within(source + part..source + part + 64, target + part);
                }
            }
        }
    }
    assert!(world.cache == expected);
}

/// Law 6: attention over two halves of the keys, merged by lse = attention over all.
fn halves_merge<B: Backend, T: Element>(slack: f32) {
    for seed in 0..6 {
        let deltas = vec![0, 5];
        let window = (seed % 2 == 0).then_some(70);
        let world = World::<T>::new(&Case { deltas, window, ..case(seed) });
        let (expected, expected_lse) = world.prefill::<B>();
        let middle = world.entries.len() / 2;
        let half = |range: std::ops::Range<usize>| {
            let mut part = world.clone();
            part.entries = world.entries[range].to_vec();
            part.entry_offsets = vec![0, part.entries.len() as i32];
            part.prefill::<B>()
        };
        let (first, second) = (half(0..middle), half(middle..world.entries.len()));
        let (outs, lses) = ([first.0, second.0].concat(), [first.1, second.1].concat());
        let mut out = vec![T::from_f32(crate::paged::POISON); expected.len()];
        let mut lse = vec![crate::paged::POISON; expected_lse.len()];
        let states = lse.len();
        B::merge_states(MergeStates {
            outs: &outs,
            lses: &lses,
            splits: 2,
            states,
            head_dim: 64,
            out: &mut out,
            lse: &mut lse,
        })
        .expect("valid params");
        assert_close(&lse, &expected_lse, SLACK, "lse");
        assert_close(&out, &expected, slack, "out");
    }
}

/// Law 5 at the level of an op: all rows at once = each row alone; decode = its row of prefill.
fn rows_are_independent<B: Backend>() {
    let world = World::<f32>::new(&case(4));
    let (whole, _) = world.prefill::<B>();
    let width = world.heads * 64;
    for row in 0..world.positions.len() {
        let mut one = world.clone();
        one.positions = vec![world.positions[row]];
        one.row_offsets = vec![0, 1];
        one.q = world.q[row * world.row_stride..(row + 1) * world.row_stride].to_vec();
        assert_close(&one.prefill::<B>().0, &whole[row * width..][..width], 0.0, "row");
        assert_close(&one.decode::<B>().0, &whole[row * width..][..width], SLACK, "decode");
    }
}

/// Scores are the masses of a softmax: they add up to rows × heads that see a key.
fn mass_is_conserved<B: Backend>() {
    for seed in 0..4 {
        let window = (seed % 2 == 0).then_some(30);
        let world = World::<f32>::new(&Case { window, ..case(seed) });
        let total: f32 = world.score::<B>().iter().sum();
        let sees = |p: &&i32| **p < 180 + 29;
        let rows = world.positions.iter().filter(sees).count() * world.heads;
        assert!((total - rows as f32).abs() < 1e-3 * rows as f32, "{total} of {rows}");
    }
}

/// A row that reads a NaN is NaN in the heads that read it; every other row keeps its bits.
fn nan_reaches_its_readers_only<B: Backend>() {
    for part in 0..2 {
        let mut world = World::<f32>::new(&case(7));
        let (clean, _) = world.prefill::<B>();
        let [block, begin, _, position, _] = world.entries[world.entries.len() / 2];
        let start = world.vectors(block, 1, begin)[part];
        world.cache[start + 5] = f32::NAN;
        let (out, _) = world.prefill::<B>();
        for (state, (out, clean)) in out.chunks(64).zip(clean.chunks(64)).enumerate() {
            let (row, head) = (state / world.heads, state % world.heads);
            let reads = world.positions[row] >= position && head / 3 == 1;
            let nan = out.iter().filter(|x| x.is_nan()).count();
            // A key spoils the whole row, a value its own column.
            assert_eq!(nan, if reads { [64, 1][part] } else { 0 }, "row {row} head {head}");
            assert!(reads || out == clean);
        }
    }
}

/// No request, no row, no entry, no visible key: out 0 and lse −∞ where there is a row at all.
fn nothing_to_see<B: Backend>() {
    let none = Case { lens: vec![0, 0], rows: vec![2, 0], ..case(0) };
    let world = World::<f32>::new(&none);
    let (out, lse) = world.prefill::<B>();
    assert_eq!((out.len(), lse.len()), (2 * 6 * 64, 2 * 6));
    assert!(out.iter().all(|&x| x.to_bits() == 0));
    assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY));
    let mut world = World::<f32>::new(&Case { lens: vec![], rows: vec![], ..case(0) });
    assert!(world.prefill::<B>().0.is_empty() && world.decode::<B>().0.is_empty());
    world.entry_offsets = vec![0, 0];
    assert!(world.score::<B>().is_empty());
    // A hole in the entries is as good as a mask.
    let mut world = World::<f32>::new(&Case { window: Some(3), ..case(2) });
    world.entries.retain(|entry| entry[3] > 60);
    world.entry_offsets[1] = world.entries.len() as i32;
    world.positions.fill(40);
    let (out, lse) = world.prefill::<B>();
    assert!(out.iter().all(|&x| x == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

/// One key: its weight is 1 whatever the score, so out is its value and lse its score.
fn one_token<B: Backend>() {
    let world = World::<f32>::new(&Case { lens: vec![1], rows: vec![3], ..case(3) });
    let (out, _) = world.prefill::<B>();
    for (state, out) in out.chunks(64).enumerate() {
        let [block, begin, ..] = world.entries[0];
        let value = world.vectors(block, state % world.heads / 3, begin)[1];
        assert_close(out, &world.cache[value..value + 64], 1e-6, "out");
    }
}

/// Values of infinite score would be NaN; a score of −∞ has no weight.
fn minus_infinity_scores<B: Backend>() {
    let mut world = World::<f32>::new(&Case { lens: vec![40], rows: vec![1], ..case(3) });
    world.positions = vec![39];
    world.q.fill(1.0);
    for [block, begin, end, position, _] in world.entries.clone() {
        for slot in begin..end {
            for head in 0..2 {
                let [key, _] = world.vectors(block, head, slot);
                let lowest = position + (slot - begin) < 20;
                world.cache[key] = if lowest { f32::NEG_INFINITY } else { 0.25 };
            }
        }
    }
    let (out, lse) = world.prefill::<B>();
    assert!(out.iter().chain(&lse).all(|x| x.is_finite()));
    world.positions = vec![10];
    let (out, lse) = world.prefill::<B>();
    assert!(out.iter().all(|&x| x == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

/// What is written is read back, through strided sources.
fn written_is_read<B: Backend>() {
    let mut world = World::<f32>::new(&case(8));
    let slots: Vec<[i32; 2]> =
        world.entries.iter().flat_map(|e| (e[1]..e[2]).map(move |slot| [e[0], slot])).collect();
    let (rows, stride) = (slots.len(), 2 * 70 + 3);
    let source: Vec<f32> = crate::paged::Random(2).values(rows * stride + 9);
    let rows_from = |start: usize| HeadRows {
        values: &source[start..],
        rows,
        heads: 2,
        head_dim: 64,
        row_stride: stride,
        head_stride: 70,
    };
    B::write_pages(WritePages {
        cache: &mut world.cache,
        geometry: world.geometry,
        layer: 1,
        scales: KvScales::ONE,
        keys: rows_from(0),
        values: rows_from(9),
        slots: &slots,
        reach: None,
        bounds: None,
    })
    .expect("valid params");
    for (row, &[block, slot]) in slots.iter().enumerate() {
        for head in 0..2 {
            let [key, value] = world.vectors(block, head, slot);
            let start = row * stride + head * 70;
            assert_eq!(world.cache[key..key + 64], source[start..start + 64]);
            assert_eq!(world.cache[value..value + 64], source[start + 9..start + 73]);
        }
    }
}

macro_rules! laws {
    ($name:ident) => {
        #[expect(non_snake_case, reason = "a module per backend type")]
        mod $name {
            use super::*;
            type B = crate::paged::$name;

            #[test]
            fn share_equals_materialise() {
                super::share_equals_materialise::<B, f32>(SLACK);
                super::share_equals_materialise::<B, f16>(4e-3);
                super::share_equals_materialise::<B, bf16>(3e-2);
            }

            #[test]
            fn rotations_add() {
                super::rotations_add::<B, f32>(1e-6);
                super::rotations_add::<B, f16>(2e-3);
                super::rotations_add::<B, bf16>(1e-2);
            }

            #[test]
            fn copies_are_exact() {
                super::copies_are_exact::<B, f32>();
                super::copies_are_exact::<B, bf16>();
                super::copies_are_exact::<B, f16>();
                super::copies_are_exact::<B, Fp8E4m3>();
            }

            #[test]
            fn halves_merge() {
                super::halves_merge::<B, f32>(SLACK);
                super::halves_merge::<B, f16>(1e-3);
                super::halves_merge::<B, bf16>(8e-3);
            }

            #[test]
            fn independence_and_conservation() {
                rows_are_independent::<B>();
                mass_is_conserved::<B>();
            }

            #[test]
            fn hostile_inputs() {
                nan_reaches_its_readers_only::<B>();
                nothing_to_see::<B>();
                one_token::<B>();
                minus_infinity_scores::<B>();
            }

            #[test]
            fn written_is_read() {
                super::written_is_read::<B>();
            }
        }
    };
}

laws!(Reference);
laws!(Cpu);
