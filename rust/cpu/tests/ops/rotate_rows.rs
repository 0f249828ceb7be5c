//! Rotation of rows: the fast version against its definition, and what both refuse.

use crate::paged::{Backend, Cpu, Random, Reference};
use half::{bf16, f16};
use kvweave_core::ops::{
    Element, HeadRows, HeadRowsMut, OpError, OpErrorKind, Pairing, RotateRows,
};
use proptest::prelude::*;

/// Rows [R, heads, D] with gaps between heads and between rows, of which W elements turn.
#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    rows: usize,
    heads: usize,
    dim: usize,
    pairs: usize,
    gap: usize,
    pairing: Pairing,
    apart: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (0usize..40, 1usize..9, 1usize..130, 0usize..5);
    (any::<u64>(), shape, any::<u16>(), any::<bool>(), any::<bool>()).prop_map(
        |(seed, (rows, heads, dim, gap), share, is_half, apart)| Case {
            seed,
            rows,
            heads,
            dim,
            pairs: usize::from(share) % (dim / 2 + 1),
            gap,
            pairing: if is_half { Pairing::Half } else { Pairing::Interleaved },
            apart,
        },
    )
}

/// Everything that the rows lie in, after the op.
fn rotated<B: Backend, T: Element>(case: &Case) -> Result<Vec<T>, OpError> {
    let Case { rows, heads, dim, pairs, gap, pairing, .. } = *case;
    let mut random = Random(case.seed);
    let (head_stride, row_stride) = (dim + gap, heads * (dim + gap) + gap);
    let given: Vec<T> = random.values(rows * row_stride + dim);
    let turns: [Vec<T>; 2] = [(); 2].map(|()| random.values(rows * 2 * pairs));
    let mut values = if case.apart { vec![T::from_f32(7.0); given.len()] } else { given.clone() };
    let source =
        HeadRows { values: &given[..], rows, heads, head_dim: dim, row_stride, head_stride };
    let [cos, sin] = [0, 1].map(|i| HeadRows::contiguous(&turns[i], rows, 1, 2 * pairs));
    let vectors =
        HeadRowsMut { values: &mut values, rows, heads, head_dim: dim, row_stride, head_stride };
    let source = case.apart.then_some(source);
    B::rotate_rows(RotateRows { name: "q", vectors, source, cos, sin, pairing })?;
    Ok(values)
}

/// Of a sum of two products of numbers within [−1, 1], as `Random` makes them.
fn expect_alike<T: Element>(case: &Case, slack: f32) {
    let (got, wanted) = (rotated::<Cpu, T>(case), rotated::<Reference, T>(case));
    let (got, wanted) = (got.expect("valid params"), wanted.expect("valid params"));
    for (got, wanted) in got.iter().zip(&wanted) {
        let (got, wanted) = (got.to_f32(), wanted.to_f32());
        assert!((got - wanted).abs() <= slack * wanted.abs().max(1.0), "{got} and {wanted}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_fast_version_is_its_definition(case in cases()) {
        expect_alike::<f32>(&case, 4e-7);
        expect_alike::<bf16>(&case, 1.0 / 256.0);
        expect_alike::<f16>(&case, 1.0 / 2048.0);
    }

    /// Every row as it is alone, whatever the number of threads.
    #[test]
    fn rows_do_not_know_each_other(case in cases(), threads in 1usize..4) {
        let case = Case { apart: false, gap: 0, heads: 64, dim: 128, pairs: 60, ..case };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let (whole, width) = (pool.install(|| rotated::<Cpu, f32>(&case)), 64 * 128);
        let (whole, mut random) = (whole.expect("valid params"), Random(case.seed));
        let given: Vec<f32> = random.values(case.rows * width + 128);
        let turns: [Vec<f32>; 2] = [(); 2].map(|()| random.values(case.rows * 120));
        for row in 0..case.rows {
            let mut alone = given[row * width..][..width].to_vec();
            let [cos, sin] = [0, 1].map(|i| &turns[i][row * 120..][..120]);
            Cpu::rotate_rows(RotateRows {
                name: "k",
                vectors: HeadRowsMut {
                    values: &mut alone,
                    rows: 1,
                    heads: 64,
                    head_dim: 128,
                    row_stride: 1,
                    head_stride: 128,
                },
                source: None,
                cos: HeadRows::contiguous(cos, 1, 1, 120),
                sin: HeadRows::contiguous(sin, 1, 1, 120),
                pairing: case.pairing,
            })
            .expect("valid params");
            prop_assert!(alone == whole[row * width..][..width]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let turn = vec![0.5f32; 64];
    let refused = |strides: (usize, usize), widths: [usize; 2], rows: usize| {
        let mut values = vec![1.0f32; 100];
        let vectors = HeadRowsMut {
            values: &mut values,
            rows: 3,
            heads: 2,
            head_dim: 8,
            row_stride: strides.0,
            head_stride: strides.1,
        };
        let [cos, sin] = widths.map(|width| HeadRows::contiguous(&turn[..], rows, 1, width));
        let pairing = Pairing::Half;
        let done =
            Cpu::rotate_rows(RotateRows { name: "k", vectors, source: None, cos, sin, pairing });
        assert!(done.is_ok() || values.iter().all(|&x| x == 1.0), "nothing is written");
        done.err().map(|error| (error.kind(), error.what()))
    };
    assert_eq!(refused((16, 8), [8, 8], 3), None);
    assert_eq!(refused((8, 24), [8, 8], 3), None);
    assert_eq!(refused((0, 8), [8, 8], 3), Some((OpErrorKind::Overlap, "k")));
    assert_eq!(refused((16, 7), [8, 8], 3), Some((OpErrorKind::Overlap, "k")));
    assert_eq!(refused((15, 8), [8, 8], 3), Some((OpErrorKind::Overlap, "k")));
    assert_eq!(refused((80, 8), [8, 8], 3), Some((OpErrorKind::Shape, "k")));
    assert_eq!(refused((16, 8), [8, 8], 4), Some((OpErrorKind::Shape, "cos")));
    assert_eq!(refused((16, 8), [8, 6], 3), Some((OpErrorKind::Shape, "sin")));
    assert_eq!(refused((16, 8), [7, 7], 3), Some((OpErrorKind::Shape, "rotary_dim")));
    assert_eq!(refused((16, 8), [10, 10], 3), Some((OpErrorKind::Shape, "rotary_dim")));
}
