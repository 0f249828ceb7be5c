//! The definition against index arithmetic and closed forms.

use kvweave_core::ops::{
    AttendPrefill, BoundValues, CopyRerotate, EdgeMass, Fp8E4m3, HeadRows, KvScales, KvView,
    MergeStates, PageBounds, PageGeometry, Pairing, Queries, Reach, RopeTable, ScoreTokens,
    Scoring, StepShape, StepTables, TableSpan, WritePages,
};
use kvweave_reference::{
    attend_prefill, copy_rerotate, merge_states, score_tokens, step_tables, write_pages,
};

const P: usize = 8;
const D: usize = 8;
const ONE: KvScales = KvScales::ONE;

/// Two layers, two KV heads: four pages a block.
fn geometry() -> PageGeometry {
    PageGeometry::arena(2, 2, P, D)
}

fn rope(pairing: Pairing) -> RopeTable {
    RopeTable::new(vec![0.5, 0.25, 0.125, 1.0, 0.3, 0.1], 2, pairing).expect("a valid table")
}

/// Attends layer 1, tokens 0..16 in blocks 4 and 8, four query heads.
fn attend(
    cache: &[f32],
    q: &[f32],
    positions: &[i32],
    window: Option<u32>,
    softcap: Option<f32>,
) -> (Vec<f32>, Vec<f32>) {
    let rows = positions.len();
    let (mut out, mut lse) = (vec![9.0; rows * 4 * D], vec![9.0; rows * 4]);
    let entries = [[4, 0, 8, 0, 0], [8, 0, 8, 8, 0]];
    attend_prefill(AttendPrefill {
        queries: Queries { vectors: HeadRows::contiguous(q, rows, 4, D), positions },
        kv: KvView {
            cache,
            geometry: geometry(),
            layer: 1,
            entries: &entries,
            reach: None,
            scales: ONE,
        },
        scoring: Scoring { scale: 0.5, rope: &rope(Pairing::Half), window, softcap },
        row_offsets: &[0, rows as i32],
        entry_offsets: &[0, 2],
        out: &mut out,
        lse: &mut lse,
    })
    .expect("valid params");
    (out, lse)
}

/// The page of (block, layer 1, head) by hand: pages of a block are layer-major.
fn page(block: usize, head: usize) -> usize {
    (block + 2 + head) * 2 * P * D
}

/// Keys all zero, value d of token t in head g is 100·g + t + d/10.
fn counting_values() -> Vec<f32> {
    let mut cache = vec![0.0; 12 * 2 * P * D];
    for (block, head, slot, d) in (0..256).map(|i| ([4, 8][i / 128], i / 64 % 2, i / 8 % 8, i % 8))
    {
        let token = (block - 4) * 2 + slot;
        cache[page(block, head) + P * D + slot * D + d] =
            100.0 * head as f32 + token as f32 + d as f32 / 10.0;
    }
    cache
}

#[test]
fn equal_scores_give_the_mean_of_what_is_visible() {
    let q = vec![1.0; 3 * 4 * D];
    let (out, lse) = attend(&counting_values(), &q, &[15, 0, 6], None, None);
    for (row, keys) in [(0, 16.0f32), (1, 1.0), (2, 7.0)] {
        for head in 0..4 {
            let state = row * 4 + head;
            assert!((lse[state] - keys.ln()).abs() < 1e-6);
            for d in 0..D {
                let mean = 100.0 * (head / 2) as f32 + (keys - 1.0) / 2.0 + d as f32 / 10.0;
                assert!((out[state * D + d] - mean).abs() < 1e-4, "row {row} head {head}");
            }
        }
    }
}

#[test]
fn a_window_keeps_the_last_keys() {
    let q = vec![1.0; 2 * 4 * D];
    let (out, lse) = attend(&counting_values(), &q, &[12, 1], Some(4), None);
    assert!((out[0] - 10.5).abs() < 1e-5, "positions 9 to 12");
    assert!((out[4 * D] - 0.5).abs() < 1e-5, "positions 0 and 1");
    assert!((lse[0] - 4f32.ln()).abs() < 1e-6);
}

/// Head 0 reads all of table 0, head 1 a sink of 2 and a window of 3 through table 1, whose pages
/// lie elsewhere and which has no entry for what head 1 never sees.
#[test]
fn heads_read_tables_pages_and_windows_of_their_own() {
    let cache = counting_values();
    let pages_of = |block: usize, head: usize| (block + 2 + head) as i32;
    let (global, local) = (pages_of(4, 0) - 1, pages_of(4, 1));
    let entries = [
        [global, 0, 8, 0, 0],
        [global + 4, 0, 8, 8, 0],
        [local, 0, 4, 0, 0],
        [local + 4, 1, 8, 9, 0],
    ];
    let heads = [[0, 1, 0, 0], [1, 0, 3, 2]];
    let geometry = PageGeometry { layers: 1, ..geometry() };
    let rope = RopeTable::new(vec![1.0], 1, Pairing::Half).expect("a valid table");
    let (q, positions) = (vec![1.0; 3 * 4 * D], [15, 3, 1]);
    let (mut out, mut lse) = (vec![9.0; 3 * 4 * D], vec![9.0; 3 * 4]);
    let queries = Queries { vectors: HeadRows::contiguous(&q, 3, 4, D), positions: &positions };
    let reach = Some(Reach { tables: 2, heads: &heads });
    let kv = KvView { cache: &cache, geometry, layer: 0, entries: &entries, reach, scales: ONE };
    let scoring = Scoring { scale: 1.0, rope: &rope, window: None, softcap: None };
    attend_prefill(AttendPrefill {
        queries,
        kv,
        scoring,
        row_offsets: &[0, 3],
        entry_offsets: &[0, 2, 4],
        out: &mut out,
        lse: &mut lse,
    })
    .expect("valid params");
    let local: [&[f32]; 3] = [&[0.0, 1.0, 13.0, 14.0, 15.0], &[0.0, 1.0, 2.0, 3.0], &[0.0, 1.0]];
    for (row, seen) in local.iter().enumerate() {
        let count = positions[row] as f32 + 1.0;
        let all = (count - 1.0) / 2.0;
        let few = 100.0 + seen.iter().sum::<f32>() / seen.len() as f32;
        for head in 0..4 {
            let (mean, keys) = [(all, count), (few, seen.len() as f32)][head / 2];
            let state = row * 4 + head;
            assert!((out[state * D] - mean).abs() < 1e-4, "row {row} head {head}");
            assert!((lse[state] - keys.ln()).abs() < 1e-6);
        }
    }
    let (mut mass, mut share) = (vec![9.0; 16], vec![9.0; 3 * 4]);
    let edge = Some(EdgeMass { window: 4, sink: 1, share: &mut share });
    let (entry_offsets, mass_of) = (&[0, 2, 4][..], &mut mass[..]);
    score_tokens(ScoreTokens { queries, kv, scoring, entry_offsets, mass: mass_of, edge })
        .expect("valid params");
    let shares = [[11.0f32 / 16.0, 1.0 / 5.0], [0.0, 0.0], [0.0, 0.0]];
    for (state, share) in share.iter().enumerate() {
        assert!((share - shares[state / 4][state / 2 % 2]).abs() < 1e-6, "state {state}");
    }
    let at_zero = 2.0 * (1.0 / 16.0 + 0.25 + 0.5) + 2.0 * (0.2 + 0.25 + 0.5);
    assert!((mass[0] - at_zero).abs() < 1e-5 && (mass[9] - 2.0 / 16.0).abs() < 1e-6);
}

#[test]
fn two_keys_are_a_logistic_and_softcap_bends_it() {
    let mut cache = counting_values();
    cache[page(4, 0)] = 3.0;
    let mut q = vec![0.0; 4 * D];
    q[0] = 2.0;
    let weight = |score: f32| 1.0 / (1.0 + (-score).exp());
    let (out, _) = attend(&cache, &q, &[1], None, None);
    assert!((out[0] - (1.0 - weight(3.0))).abs() < 1e-6, "token 0 has score 0.5 · 2 · 3");
    let (out, _) = attend(&cache, &q, &[1], None, Some(2.0));
    let capped = 2.0 * 1.5f32.tanh();
    assert!((out[0] - (1.0 - weight(capped))).abs() < 1e-6);
}

#[test]
fn rotation_by_hand_in_both_pairings() {
    for (pairing, first, second) in [(Pairing::Half, 1, 4), (Pairing::Interleaved, 2, 3)] {
        let mut cache = vec![0.0f32; 12 * 2 * P * D];
        for head in 0..2 {
            let key = page(4, head) + 2 * D;
            cache[key + first] = 1.0;
            cache[key + 7] = 5.0;
        }
        let copies = [[4, 2, 8, 6, 1, 3]];
        let (geometry, rope) = (geometry(), rope(pairing));
        copy_rerotate(CopyRerotate {
            cache: &mut cache,
            geometry,
            source: None,
            copies: &copies,
            rope: &rope,
            layers: None,
        })
        .expect("valid params");
        for head in 0..2 {
            let key = &cache[page(8, head) + 6 * D..][..D];
            let angle = 3.0 * 0.3f32;
            assert!((key[first] - angle.cos()).abs() < 1e-6);
            assert!((key[second] - angle.sin()).abs() < 1e-6);
            assert_eq!(key[7], 5.0, "past rotary_dim nothing turns");
        }
    }
}

#[test]
fn bounds_of_a_page_by_hand() {
    let mut cache = vec![f32::NAN; 12 * 2 * P * D];
    for (slot, key) in [(2, 4.0), (3, -1.0), (4, 0.5)] {
        cache[page(8, 1) + slot * D..][..D].fill(key);
        cache[page(8, 0) + slot * D..][..D].fill(7.0);
    }
    cache[page(8, 1) + 3 * D + 5] = f32::NAN;
    let mut values = vec![-9.0f32; 12 * 3 * D];
    let nothing = HeadRows::contiguous(&[], 0, 2, D);
    write_pages(WritePages {
        cache: &mut cache,
        geometry: geometry(),
        layer: 1,
        scales: ONE,
        keys: nothing,
        values: nothing,
        slots: &[],
        reach: None,
        bounds: Some(PageBounds {
            values: BoundValues::F32(&mut values),
            held: &[[8, 2, 5]],
            rows: None,
        }),
    })
    .expect("valid params");
    let (first, second) = (8 + 2, 8 + 3);
    let row = |page: usize| &values[page * 3 * D..(page + 1) * 3 * D];
    assert!(row(first).iter().all(|&x| x == 7.0));
    let mean = ((4.0 - 1.0 + 0.5) / 3.0f64) as f32;
    for (d, &x) in row(second).iter().enumerate() {
        let wanted = [-1.0, 4.0, mean][d / D];
        assert!(if d % D == 5 { x.is_nan() } else { x == wanted }, "{d}: {x}");
    }
    assert_eq!(values.iter().filter(|&&x| x != -9.0).count(), 2 * 3 * D);
}

#[test]
fn slots_are_where_index_arithmetic_says() {
    let mut cache = vec![-1.0f32; 12 * 2 * P * D];
    let keys: Vec<f32> = (0..32).map(|x| x as f32).collect();
    let values: Vec<f32> = (100..132).map(|x| x as f32).collect();
    write_pages(WritePages {
        cache: &mut cache,
        geometry: geometry(),
        layer: 1,
        scales: ONE,
        keys: HeadRows::contiguous(&keys, 2, 2, D),
        values: HeadRows::contiguous(&values, 2, 2, D),
        slots: &[[8, 7], [4, 0]],
        reach: None,
        bounds: None,
    })
    .expect("valid params");
    for (row, block, slot) in [(0, 8, 7), (1, 4, 0)] {
        for head in 0..2 {
            let start = page(block, head) + slot * D;
            let source = (row * 2 + head) * D;
            assert_eq!(cache[start..start + D], keys[source..source + D]);
            assert_eq!(cache[start + P * D..][..D], values[source..source + D]);
        }
    }
    assert_eq!(cache.iter().filter(|&&x| x != -1.0).count(), 64);
}

#[test]
fn uniform_rows_spread_their_mass_evenly() {
    let cache = counting_values();
    let (q, mut mass) = (vec![1.0; 2 * 4 * D], vec![9.0; 16]);
    score_tokens(ScoreTokens {
        queries: Queries { vectors: HeadRows::contiguous(&q, 2, 4, D), positions: &[3, 7] },
        kv: KvView {
            cache: &cache,
            geometry: geometry(),
            layer: 1,
            entries: &[[4, 0, 8, 0, 0], [8, 0, 8, 8, 0]],
            reach: None,
            scales: ONE,
        },
        scoring: Scoring { scale: 1.0, rope: &rope(Pairing::Half), window: None, softcap: None },
        entry_offsets: &[0, 2],
        mass: &mut mass,
        edge: None,
    })
    .expect("valid params");
    let expected = |p: usize| 4.0 * ([0.25, 0.0][p / 4 % 2] + 0.125) * [1.0, 0.0][p / 8];
    for (p, mass) in mass.iter().enumerate() {
        assert!((mass - expected(p)).abs() < 1e-6, "position {p}");
    }
}

#[test]
fn merging_weighs_by_mass() {
    let inf = f32::NEG_INFINITY;
    let outs = [1.0f32, 2.0, 7.0, 7.0, 5.0, 6.0, 7.0, 7.0];
    let (mut out, mut lse) = ([9.0f32; 4], [9.0f32; 2]);
    merge_states(MergeStates {
        outs: &outs,
        lses: &[3f32.ln(), inf, 0.0, inf],
        splits: 2,
        states: 2,
        head_dim: 2,
        out: &mut out,
        lse: &mut lse,
    })
    .expect("valid params");
    assert_eq!(out, [2.0, 3.0, 0.0, 0.0]);
    assert!((lse[0] - 4f32.ln()).abs() < 1e-6 && lse[1] == inf);
}

/// Head 0 keeps every token in page 1 of its table's blocks, head 1 only the last in page 0 of
/// blocks that are elsewhere.
#[test]
fn heads_are_written_where_their_tables_say() {
    let mut cache = vec![-9.0f32; 12 * 2 * P * D];
    let keys: Vec<f32> = (0..2 * 2 * D).map(|i| i as f32).collect();
    let values: Vec<f32> = keys.iter().map(|key| 100.0 + key).collect();
    let heads = [[0, 1, 0, 0], [1, 0, 3, 2]];
    write_pages(WritePages {
        cache: &mut cache,
        geometry: geometry(),
        layer: 1,
        scales: ONE,
        keys: HeadRows::contiguous(&keys, 2, 2, D),
        values: HeadRows::contiguous(&values, 2, 2, D),
        slots: &[[4, 7], [6, 0], [-1, -1], [5 + 3, 2]],
        reach: Some(Reach { tables: 2, heads: &heads }),
        bounds: None,
    })
    .expect("valid params");
    for (page, slot, row, head) in [(5, 7, 0, 0), (7, 0, 1, 0), (8, 2, 1, 1)] {
        let (from, key) = ((row * 2 + head) * D, (page * 2 * P + slot) * D);
        assert_eq!(cache[key..key + D], keys[from..from + D]);
        assert_eq!(cache[key + P * D..][..D], values[from..from + D]);
    }
    assert_eq!(cache.iter().filter(|&&x| x != -9.0).count(), 3 * 2 * D);
}

/// Pages of a head group turn with the frequencies of the layers that they are told.
#[test]
fn pages_of_a_head_group_turn_by_their_layers() {
    let mut cache = vec![0.0f32; 12 * 2 * P * D];
    let page = |number: usize, slot: usize| (number * 2 * P + slot) * D;
    for number in 4..7 {
        cache[page(number, 1)] = 1.0;
        cache[page(number, 1) + P * D] = number as f32;
    }
    let rope = RopeTable::new(vec![0.25, 0.5], 2, Pairing::Half).expect("a valid table");
    let (geometry, layers) = (geometry(), Some(&[1, 0, 1][..]));
    let copies = [[4, 1, 8, 5, 1, -2]];
    let cache_of = &mut cache;
    copy_rerotate(CopyRerotate {
        cache: cache_of,
        geometry,
        source: None,
        copies: &copies,
        rope: &rope,
        layers,
    })
    .expect("valid params");
    for (number, angle) in [(8, -1.0f32), (9, -0.5), (10, -1.0)] {
        let key = page(number, 5);
        assert!(
            (cache[key] - angle.cos()).abs() < 1e-6 && (cache[key + 1] - angle.sin()).abs() < 1e-6
        );
        assert_eq!(cache[key + P * D], number as f32 - 4.0);
    }
}

/// Rows are stored as the nearest e4m3 numbers to their quotients by the scales, and read as what
/// these stand for.
#[test]
fn scales_of_an_fp8_cache_by_hand() {
    let mut cache = vec![Fp8E4m3::from_bits(0x7f); 12 * 2 * P * D];
    let scales = KvScales { key: 0.5, value: 4.0 };
    let row = [1.0f32, -0.07, 0.0, 300.0, 1e-6, 0.55, f32::INFINITY, f32::NAN];
    let rows: Vec<f32> = row.repeat(2);
    let (mut bounds, geometry) = (vec![-9.0f32; 12 * 3 * D], geometry());
    write_pages(WritePages {
        cache: &mut cache,
        geometry,
        layer: 1,
        scales,
        keys: HeadRows::contiguous(&rows, 1, 2, D),
        values: HeadRows::contiguous(&rows, 1, 2, D),
        slots: &[[8, 3]],
        reach: None,
        bounds: Some(PageBounds {
            values: BoundValues::F32(&mut bounds),
            held: &[[8, 3, 4]],
            rows: None,
        }),
    })
    .expect("valid params");
    let at = page(8, 1) + 3 * D;
    let bits = |start: usize| cache[start..start + D].iter().map(|x| x.to_bits());
    // Twice, and a quarter of, each number.
    assert!(bits(at).eq([0x40, 0xa1, 0x00, 0x7e, 0x00, 0x39, 0x7e, 0x7f]));
    assert!(bits(at + P * D).eq([0x28, 0x89, 0x00, 0x69, 0x00, 0x21, 0x7e, 0x7f]));
    let keys = [1.0, -0.0703125, 0.0, 224.0, 0.0, 0.5625, 224.0];
    for bound in bounds[(8 + 3) * 3 * D..][..3 * D].chunks_exact(D) {
        assert_eq!(bound[..7], keys);
        assert!(bound[7].is_nan());
    }

    cache[at + 7] = Fp8E4m3::from_bits(0);
    cache[at + P * D + 7] = Fp8E4m3::from_bits(0);
    let (q, mut out, mut lse) = ([0.25f32; 4 * D], [9.0f32; 4 * D], [9.0f32; 4]);
    attend_prefill(AttendPrefill {
        queries: Queries { vectors: HeadRows::contiguous(&q, 1, 4, D), positions: &[0] },
        kv: KvView {
            cache: &cache,
            geometry,
            layer: 1,
            entries: &[[8, 3, 4, 0, 0]],
            reach: Some(Reach { tables: 1, heads: &[[0, 3, 0, 0], [0, 3, 0, 0]] }),
            scales,
        },
        scoring: Scoring { scale: 2.0, rope: &rope(Pairing::Half), window: None, softcap: None },
        row_offsets: &[0, 1],
        entry_offsets: &[0, 1],
        out: &mut out,
        lse: &mut lse,
    })
    .expect("valid params");
    let values = [1.0, -0.0703125, 0.0, 288.0, 0.0, 0.5625, 1792.0, 0.0];
    assert!(out.chunks_exact(D).all(|out| out == values));
    let score = 0.5 * (keys.iter().sum::<f32>());
    assert!(lse.iter().all(|lse| (lse - score).abs() < 1e-4));
}

#[test]
fn tables_of_a_step_by_hand() {
    // Two requests on pages of 8 tokens: of the first, 30 tokens, the last two are computed; a row
    // pads the batch. Table 0 sees all, table 1 the first key and the latest five.
    let spans =
        [(0, 0, 4), (5, 1, 2)].map(|(window, sink, columns)| TableSpan { window, sink, columns });
    let shape = StepShape {
        requests: 2,
        rows: 4,
        columns: 4,
        page_tokens: P,
        block_pages: 1,
        spans: &spans,
        places: Some(7),
    };
    let places = [[0, 10, 20, 30, 40, 50, 60], [0, 11, 21, 0, 41, 51, 61]].concat();
    let (mut positions, mut slots) = ([9; 4], [[9; 2]; 8]);
    let (mut entries, mut offsets) = ([[9; 5]; 13], [9; 5]);
    step_tables(StepTables {
        shape,
        blocks: &[1, 2, 3, 4, 77, 5, 99, 99, 99],
        block_stride: 5,
        lengths: &[30, 3],
        query_start: &[0, 2, 3],
        slot_mapping: &[4 * 8 + 4, 3 * 8 + 5, 5 * 8 + 2, -1],
        places: Some(&places),
        positions: &mut positions,
        slots: &mut slots,
        entries: &mut entries,
        offsets: &mut offsets,
    })
    .expect("a valid call");
    assert_eq!(positions, [28, 29, 2, 3]);
    assert_eq!(offsets, [0, 4, 6, 7, 8]);
    assert_eq!(
        entries[..4],
        [[10, 0, 8, 0, 0], [20, 0, 8, 8, 0], [30, 0, 8, 16, 0], [40, 0, 6, 24, 0]]
    );
    assert_eq!(entries[4..6], [[11, 0, 8, 0, 0], [41, 0, 6, 24, 0]]);
    assert_eq!(entries[6..8], [[50, 0, 3, 0, 0], [51, 0, 3, 0, 0]]);
    assert_eq!(entries[8..], [[9; 5]; 5]);
    assert_eq!(slots[..4], [[40, 4], [30, 5], [50, 2], [-1, -1]]);
    assert_eq!(slots[4..], [[41, 4], [-1, -1], [51, 2], [-1, -1]]);
}
