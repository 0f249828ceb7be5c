//! Heads that read tables, pages, windows and sinks of their own.

use crate::match_reference::cases;
use crate::paged::{Backend, Case, Cpu, Random, Reference, World, WorldReach, assert_close};
use half::{bf16, f16};
use kvweave_core::ops::Element;
use proptest::prelude::*;

const SLACK: f32 = 2e-5;

/// What one KV head reads: table, window (0 for none), sink.
type Head = (usize, i32, i32);

/// Windows and sinks around the size of a key tile, and smaller and larger ones.
fn random_heads(kv_heads: usize, tables: usize, random: &mut Random) -> Vec<Head> {
    let mut pick = |numbers: &[i32]| numbers[random.below(numbers.len())];
    let tables: Vec<i32> = (0..tables as i32).collect();
    (0..kv_heads)
        .map(|_| {
            let window = pick(&[0, 1, 2, 30, 64, 65, 100, i32::MAX]);
            (pick(&tables) as usize, window, pick(&[0, 1, 4, 16, 63, 64, 70, i32::MAX]))
        })
        .collect()
}

fn sees((_, window, sink): Head, row: i32, key: i32) -> bool {
    let near = window == 0 || i64::from(key) > i64::from(row) - i64::from(window);
    key <= row && (near || key < sink)
}

/// The same tokens, with blocks of their own per table that hold no more than its heads see.
fn regroup<T: Element>(dense: &World<T>, heads: &[Head], tables: usize) -> World<T> {
    let mut world = dense.clone();
    let page = dense.geometry.block_stride;
    let rank = |g: usize| 2 * heads[..g].iter().filter(|head| head.0 == heads[g].0).count() + 1;
    let rows = heads.iter().enumerate();
    let rows = rows.map(|(g, &(table, w, sink))| [table as i32, rank(g) as i32, w, sink]).collect();
    world.reach = Some(WorldReach { tables, heads: rows });
    (world.entries, world.entry_offsets) = (Vec::new(), vec![0]);
    world.cache = vec![T::from_f32(f32::NAN); page];
    for request in 0..dense.entry_offsets.len() - 1 {
        for table in 0..tables {
            let readers: Vec<usize> = (0..heads.len()).filter(|&g| heads[g].0 == table).collect();
            let rows = dense.rows_of(request);
            let kept = |p: i32| readers.iter().any(|&g| rows.iter().any(|&i| sees(heads[g], i, p)));
            for entry in dense.entries_of(request) {
                for part in parts_of(*entry, kept) {
                    let block = (world.cache.len() / page) as i32;
                    let pages = 2 * readers.len() + 2;
                    world.cache.resize(world.cache.len() + pages * page, T::from_f32(f32::NAN));
                    let [old, begin, end, position, delta] = part;
                    world.entries.push([block, begin, end, position, delta]);
                    for (&g, slot) in readers.iter().flat_map(|g| (begin..end).map(move |s| (g, s)))
                    {
                        copy_token(dense, (old, g, slot), &mut world, (block, g, slot));
                    }
                }
            }
            world.entry_offsets.push(world.entries.len() as i32);
        }
    }
    world
}

type Place = (i32, usize, i32);

fn copy_token<T: Element>(from: &World<T>, source: Place, to: &mut World<T>, target: Place) {
    let place = |world: &World<T>, (block, head, slot): Place| {
        let key = world.kv().key_offset(block as usize, head, slot as usize);
        [key, key + world.geometry.value_offset]
    };
    let dim = from.geometry.head_dim;
    for (source, target) in place(from, source).into_iter().zip(place(to, target)) {
        to.cache[target..target + dim].copy_from_slice(&from.cache[source..source + dim]);
    }
}

/// The runs of an entry's tokens that are kept, as entries.
fn parts_of(entry: [i32; 5], kept: impl Fn(i32) -> bool) -> Vec<[i32; 5]> {
    let [block, begin, end, position, delta] = entry;
    let mut parts: Vec<[i32; 5]> = Vec::new();
    for slot in begin..end {
        let at = position + (slot - begin);
        match parts.last_mut() {
            _ if !kept(at) => {}
            Some(last) if last[2] == slot => last[2] += 1,
            _ => parts.push([block, slot, slot + 1, at, delta]),
        }
    }
    parts
}

impl<T: Element> World<T> {
    fn rows_of(&self, request: usize) -> &[i32] {
        &self.positions[self.row_offsets[request] as usize..self.row_offsets[request + 1] as usize]
    }

    fn entries_of(&self, request: usize) -> &[[i32; 5]] {
        let offsets = &self.entry_offsets[request..];
        &self.entries[offsets[0] as usize..offsets[1] as usize]
    }

    /// Only row `row` of `request`, and only the keys that `head` sees from there.
    fn masked(&self, request: usize, row: usize, head: Head) -> Self {
        let mut one = self.clone();
        let position = self.positions[row];
        let entries = self.entries_of(request).iter();
        let seen = entries.flat_map(|entry| parts_of(*entry, |key| sees(head, position, key)));
        one.entries = seen.collect();
        one.entry_offsets = vec![0, one.entries.len() as i32];
        one.positions = vec![position];
        one.row_offsets = vec![0, 1];
        one.q = self.q[row * self.row_stride..(row + 1) * self.row_stride].to_vec();
        one
    }
}

fn without_window(case: &Case) -> Case {
    Case { window: None, ..case.clone() }
}

/// Every head of every row = dense attention over the keys that it sees.
fn masked_dense<B: Backend, T: Element>(case: &Case, tables: usize, slack: f32) {
    let dense = World::<T>::new(case);
    let heads = random_heads(case.kv_heads, tables, &mut Random(case.seed ^ 7));
    let world = regroup(&dense, &heads, tables);
    let (out, lse) = world.prefill::<B>();
    let width = case.head_dim;
    for request in 0..case.lens.len() {
        for row in dense.row_offsets[request] as usize..dense.row_offsets[request + 1] as usize {
            for (g, &head) in heads.iter().enumerate() {
                let (expected, expected_lse) =
                    dense.masked(request, row, head).prefill::<Reference>();
                let query_heads = g * case.group..(g + 1) * case.group;
                let values = query_heads.start * width..query_heads.end * width;
                let start = row * dense.heads;
                let got = &out[start * width..][values.clone()];
                assert_close(got, &expected[values], slack, "out");
                let got = &lse[start..][query_heads.clone()];
                assert_close(got, &expected_lse[query_heads], SLACK, "lse");
            }
        }
    }
}

fn small(seed: u64, lens: Vec<usize>, rows: Vec<usize>) -> Case {
    Case {
        seed,
        head_dim: 16,
        kv_heads: 4,
        group: 2,
        page_tokens: 16,
        lens,
        rows,
        window: None,
        softcap: seed.is_multiple_of(3).then_some(5.0),
        interleaved: false,
        deltas: vec![0, 9, -700],
        ragged: true,
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|x| x.to_f32().to_bits()).collect()
}

/// Global heads over one table, at the pages where the geometry has them: not a bit changes.
fn global_heads_are_dense<T: Element>(case: &Case) {
    let dense = World::<T>::new(case);
    let first = dense.layer * case.kv_heads;
    let heads: Vec<_> = (first..first + case.kv_heads).map(|r| [0, r as i32, 0, 3]).collect();
    let world = World { reach: Some(WorldReach { tables: 1, heads }), ..dense.clone() };
    let (expected, got) = (dense.prefill::<Cpu>(), world.prefill::<Cpu>());
    assert_eq!(bits(&got.0), bits(&expected.0));
    assert_eq!(bits(&got.1), bits(&expected.1));
    if case.lens.len() == 1 {
        let (expected, got) =
            (dense.score_and_edge::<Cpu>(9, 2), world.score_and_edge::<Cpu>(9, 2));
        assert_eq!(bits(&got.0), bits(&expected.0));
        assert_eq!(bits(&got.1), bits(&expected.1));
    }
    if case.rows.iter().all(|&rows| rows == 1) {
        assert_eq!(bits(&world.decode::<Cpu>().0), bits(&dense.decode::<Cpu>().0));
    }
}

/// One window and no sink in every head = the window of the call: not a bit changes.
fn one_window_is_the_calls<T: Element>(case: &Case, window: i32) {
    let dense = World::<T>::new(&Case { window: Some(window.cast_unsigned()), ..case.clone() });
    let first = dense.layer * case.kv_heads;
    let heads: Vec<_> = (first..first + case.kv_heads).map(|r| [0, r as i32, window, 0]).collect();
    let reach = Some(WorldReach { tables: 1, heads });
    let world = World { reach, window: None, ..dense.clone() };
    assert_eq!(bits(&world.prefill::<Cpu>().0), bits(&dense.prefill::<Cpu>().0));
}

fn fast_is_defined<T: Element>(case: &Case, tables: usize) {
    let heads = random_heads(case.kv_heads, tables, &mut Random(case.seed ^ 7));
    let world = regroup(&World::<T>::new(case), &heads, tables);
    let ((out, lse), (expected, expected_lse)) =
        (world.prefill::<Cpu>(), world.prefill::<Reference>());
    assert_close(&lse, &expected_lse, SLACK, "lse");
    assert_close(&out, &expected, SLACK, "out");
    let decoded = World::<T>::new(&Case { rows: vec![1; case.lens.len()], ..case.clone() });
    let decoded = regroup(&decoded, &heads, tables);
    let ((out, lse), (expected, expected_lse)) =
        (decoded.decode::<Cpu>(), decoded.decode::<Reference>());
    assert_close(&lse, &expected_lse, SLACK, "lse of decode");
    assert_close(&out, &expected, SLACK, "out of decode");
    let (lens, rows) = (case.lens[..1].to_vec(), case.rows[..1].to_vec());
    let scored = regroup(&World::<T>::new(&Case { lens, rows, ..case.clone() }), &heads, tables);
    let (window, sink) = (1 + (case.seed % 90) as u32, (case.seed % 7) as u32);
    let ((mass, edge), (expected, expected_edge)) = (
        scored.score_and_edge::<Cpu>(window, sink),
        scored.score_and_edge::<Reference>(window, sink),
    );
    assert_close(&mass, &expected, SLACK, "mass");
    assert_close(&edge, &expected_edge, SLACK, "edge");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn fast_versions_follow_the_definition(case in cases(), tables in 1usize..4) {
        let case = without_window(&case);
        fast_is_defined::<f32>(&case, tables);
        fast_is_defined::<bf16>(&case, tables);
        fast_is_defined::<f16>(&case, tables);
    }

    #[test]
    fn local_heads_are_masked_dense_ones(
        seed in any::<u64>(),
        lens in prop::collection::vec(0usize..260, 1..3),
        tables in 1usize..4,
    ) {
        let rows = vec![3; lens.len()];
        masked_dense::<Reference, f32>(&small(seed, lens.clone(), rows.clone()), tables, 1e-6);
        masked_dense::<Cpu, f32>(&small(seed, lens.clone(), rows.clone()), tables, SLACK);
        masked_dense::<Cpu, bf16>(&small(seed, lens, rows), tables, SLACK);
    }

    #[test]
    fn reaching_everything_changes_no_bit(case in cases(), window in 1i32..150) {
        let case = without_window(&case);
        global_heads_are_dense::<f32>(&case);
        global_heads_are_dense::<bf16>(&case);
        one_window_is_the_calls::<f32>(&case, window);
        let rows = vec![1; case.lens.len()];
        global_heads_are_dense::<f32>(&Case { rows, ..case });
    }

    /// The share of a row's mass beyond sink and window is the sum of the masses there.
    #[test]
    fn edge_is_mass_outside(
        seed in any::<u64>(),
        len in 0usize..300,
        window in 1u32..200,
        sink in 0u32..80,
        local in 0i32..200,
    ) {
        let case = Case { kv_heads: 1, group: 1, ..small(seed, vec![len], vec![1]) };
        let world = regroup(&World::<f32>::new(&case), &[(0, local, 5)], 1);
        let row = world.positions[0];
        let near = (0, window as i32, sink as i32);
        for (mass, edge) in [
            world.score_and_edge::<Reference>(window, sink),
            world.score_and_edge::<Cpu>(window, sink),
        ] {
            let far = mass.iter().enumerate().filter(|&(p, _)| !sees(near, row, p as i32));
            let far: f32 = far.map(|(_, mass)| mass).sum();
            assert_close(&edge, &[far], SLACK, "edge");
        }
    }
}

/// What lies between a sink and the window of the lowest row is never read: NaN or missing.
#[test]
fn the_gap_is_not_read() {
    let dense = World::<f32>::new(&small(5, vec![900], vec![6]));
    let dense = World { positions: vec![899, 800, 750, 700, 610, 600], ..dense };
    let heads = [(0, 0, 0), (1, 100, 4), (1, 64, 0), (2, 130, 64)];
    let lean = regroup(&dense, &heads, 3);
    let count = |table: usize| lean.entry_offsets[table + 1] - lean.entry_offsets[table];
    assert!(count(1) < count(0) && count(2) < count(0), "local tables are shorter");
    let everywhere = World { positions: (0..900).collect(), row_offsets: vec![0, 900], ..dense };
    let full = regroup(&everywhere, &heads, 3);
    let (positions, row_offsets) = (lean.positions.clone(), vec![0, 6]);
    let full = World { positions, row_offsets, ..full };
    assert!(full.entries.len() > lean.entries.len());
    let (out, _) = lean.prefill::<Cpu>();
    assert!(out.iter().all(|x| x.is_finite()));
    assert_close(&out, &full.prefill::<Cpu>().0, SLACK, "out");
    assert_close(&lean.score::<Cpu>(), &full.score::<Cpu>(), SLACK, "mass");
}

/// The bits of a row with a reach depend on no other row and on no number of threads.
#[test]
fn rows_keep_their_bits() {
    for seed in 0..6 {
        let dense = World::<f32>::new(&small(seed, vec![700], vec![60]));
        let heads = random_heads(4, 2, &mut Random(seed));
        let world = regroup(&dense, &heads, 2);
        let (whole, _) = world.prefill::<Cpu>();
        let (_, edge) = world.score_and_edge::<Cpu>(50, 4);
        let width = world.heads * 16;
        for row in (0..60).step_by(7) {
            let mut one = world.clone();
            (one.positions, one.row_offsets) = (vec![world.positions[row]], vec![0, 1]);
            one.q = world.q[row * world.row_stride..(row + 1) * world.row_stride].to_vec();
            assert_eq!(bits(&one.prefill::<Cpu>().0), bits(&whole[row * width..][..width]));
            let (_, share) = one.score_and_edge::<Cpu>(50, 4);
            assert_eq!(bits(&share), bits(&edge[row * world.heads..][..world.heads]));
        }
    }
}

/// Many splits of the keys, a sink among them.
#[test]
fn long_decode() {
    let dense = World::<f32>::new(&small(9, vec![3000, 70, 1500], vec![1; 3]));
    let dense = World { positions: vec![2999, 69, 1499], ..dense };
    let heads = [(0, 0, 0), (1, 256, 4), (1, 1000, 100), (2, 1, 0)];
    let world = regroup(&dense, &heads, 3);
    let ((out, lse), (expected, expected_lse)) =
        (world.decode::<Cpu>(), world.decode::<Reference>());
    assert_close(&out, &expected, SLACK, "out");
    assert_close(&lse, &expected_lse, SLACK, "lse");
    assert_close(&world.prefill::<Cpu>().0, &expected, SLACK, "prefill");
}
