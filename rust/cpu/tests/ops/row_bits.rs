//! A row's bits depend on nothing but its own query, position and keys.

use crate::paged::{Case, Cpu, Random, World};
use half::bf16;
use kvweave_core::ops::Element;
use proptest::prelude::*;

fn case(seed: u64, len: usize, group: usize, window: Option<u32>) -> Case {
    Case {
        seed,
        head_dim: 64,
        kv_heads: 2,
        group,
        page_tokens: 16,
        lens: vec![len],
        rows: vec![150],
        window,
        softcap: None,
        interleaved: false,
        deltas: vec![0, 11],
        ragged: true,
    }
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|x| x.to_f32().to_bits()).collect()
}

/// The world with only the given rows, in the given order.
fn only<T: Element>(world: &World<T>, rows: &[usize]) -> World<T> {
    let mut part = world.clone();
    part.positions = rows.iter().map(|&row| world.positions[row]).collect();
    part.row_offsets = vec![0, rows.len() as i32];
    let stride = world.row_stride;
    part.q = rows.iter().flat_map(|&r| world.q[r * stride..(r + 1) * stride].to_vec()).collect();
    part
}

fn in_pool<R: Send>(threads: usize, run: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("a pool").install(run)
}

fn check<T: Element>(case: &Case) {
    let world = World::<T>::new(case);
    let (whole, whole_lse) = world.prefill::<Cpu>();
    let (whole, whole_lse) = (bits(&whole), bits(&whole_lse));
    let mut random = Random(case.seed ^ 1);
    for threads in [1, 2, 5] {
        let mut rows: Vec<usize> = (0..world.positions.len()).collect();
        random.shuffle(&mut rows);
        rows.truncate(1 + random.below(rows.len()));
        let part = only(&world, &rows);
        let (out, lse) = in_pool(threads, || part.prefill::<Cpu>());
        let (out, lse) = (bits(&out), bits(&lse));
        let width = world.heads * case.head_dim;
        for (i, &row) in rows.iter().enumerate() {
            assert_eq!(out[i * width..][..width], whole[row * width..][..width], "row {row}");
            let heads = world.heads;
            assert_eq!(lse[i * heads..][..heads], whole_lse[row * heads..][..heads]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn subsets_orders_and_threads(
        seed in any::<u64>(),
        len in 1usize..500,
        group in 1usize..9,
        window in prop::option::of(1u32..300),
    ) {
        check::<f32>(&case(seed, len, group, window));
        check::<bf16>(&case(seed, len, group, window));
    }

    /// What lies behind a row's position, finite or not, changes none of its bits: so neither do
    /// tokens that come later, nor slots that are not written yet.
    #[test]
    fn later_tokens(seed in any::<u64>(), len in 2usize..300, group in 1usize..5) {
        let mut world = World::<f32>::new(&case(seed, len, group, None));
        let limit = len as i32 / 2;
        world.positions.iter_mut().for_each(|position| *position %= limit);
        let before = world.prefill::<Cpu>();
        for (i, [block, begin, end, position, _]) in world.entries.clone().into_iter().enumerate() {
            for slot in begin..end {
                if position + (slot - begin) < limit {
                    continue;
                }
                let [k, v] = world.vectors(block, 0, slot);
                let [other_k, other_v] = world.vectors(block, 1, slot);
                for start in [k, v, other_k, other_v] {
                    world.cache[start + i % 64] = [f32::NAN, f32::INFINITY, 3.0][i % 3];
                }
            }
        }
        let after = world.prefill::<Cpu>();
        assert_eq!(bits(&before.0), bits(&after.0));
        assert_eq!(bits(&before.1), bits(&after.1));
    }

    /// Where blocks lie in the arena changes no bit.
    #[test]
    fn block_numbers(seed in any::<u64>(), len in 1usize..300) {
        let world = World::<f32>::new(&case(seed, len, 3, None));
        let mut moved = world.clone();
        let pages = world.geometry.layers * world.geometry.kv_heads;
        let block_elements = pages * world.geometry.block_stride;
        moved.cache.splice(0..0, vec![f32::NAN; 3 * block_elements]);
        moved.entries.iter_mut().for_each(|entry| entry[0] += 3 * pages as i32);
        assert_eq!(bits(&world.prefill::<Cpu>().0), bits(&moved.prefill::<Cpu>().0));
    }

    #[test]
    fn decode_and_scores_on_any_number_of_threads(seed in any::<u64>(), len in 1usize..2000) {
        let case = case(seed, len, 3, None);
        let scored = World::<f32>::new(&case);
        let decoded = only(&scored, &[0]);
        let one = in_pool(1, || (decoded.decode::<Cpu>().0, scored.score::<Cpu>()));
        let many = in_pool(5, || (decoded.decode::<Cpu>().0, scored.score::<Cpu>()));
        assert_eq!(bits(&one.0), bits(&many.0));
        assert_eq!(bits(&one.1), bits(&many.1));
    }
}
