//! Sizes that no memory has: refused before anything is allocated or multiplied by them.

use kvweave_core::ops::{
    AttendDecode, AttendPrefill, CopyRerotate, CopySource, EdgeMass, HeadRows, KvScales, KvView,
    OpError, OpErrorKind, PageGeometry, Pairing, Queries, RopeTable, ScoreTokens, Scoring,
    validate_bounds,
};
use proptest::prelude::*;

const D: usize = 8;
const PAGE: usize = 2 * 4 * D;

fn rope(layers: usize) -> RopeTable {
    RopeTable::new(vec![1.0; 4 * layers], layers, Pairing::Half).expect("a valid table")
}

/// No copies, in a cache of so many pages, with a source of as many pages as it says.
fn copy_nothing(
    geometry: PageGeometry,
    pages: usize,
    source: Option<usize>,
) -> Result<(), OpError> {
    let mut cache = vec![0.0f32; pages * PAGE];
    let read = source.map(|pages| vec![0.0f32; pages * PAGE]);
    let source = read.as_ref().map(|pages| CopySource { pages, geometry });
    let rope = rope(geometry.layers);
    let (cache, copies) = (&mut cache[..], &[][..]);
    CopyRerotate { cache, geometry, source, copies, rope: &rope, layers: None }.validate()
}

/// A call that accepts an empty table may allocate by the pages that its geometry gives a block.
#[test]
fn a_call_without_copies_is_of_blocks_that_the_cache_can_hold() {
    for kv_heads in [5, 1 << 31, usize::MAX / 64, usize::MAX] {
        let geometry = PageGeometry { kv_heads, ..PageGeometry::arena(2, 1, 4, D) };
        let spread = PageGeometry { layer_stride: kv_heads.wrapping_mul(PAGE), ..geometry };
        for wrong in [geometry, spread, PageGeometry::arena(2, kv_heads, 4, D)] {
            let refused = copy_nothing(wrong, 8, None).expect_err("a refusal").kind();
            let expected = [OpErrorKind::OutOfRange, OpErrorKind::Overlap];
            assert!(expected.contains(&refused), "{kv_heads}: {refused:?}");
        }
    }
    let unmoved = PageGeometry { head_stride: 0, ..PageGeometry::arena(1, 1 << 31, 4, D) };
    assert_eq!(copy_nothing(unmoved, 8, None).expect_err("alias").kind(), OpErrorKind::Overlap);
}

/// Axes whose stride is 0 may have any size: a number of heads, times one of rows, may be beyond
/// every number, and no result has room for it.
#[test]
fn results_for_more_vectors_than_can_be_counted_are_refused() {
    let (cache, entries) = ([0.0f32; 2 * PAGE], [[1, 0, 4, 0, 0]]);
    let (vector, positions) = ([0.0f32; D], [3, 2, 1, 0]);
    let geometry = PageGeometry::arena(1, 1, 4, D);
    let rope = rope(1);
    let scoring = Scoring { scale: 1.0, rope: &rope, window: None, softcap: None };
    for (heads, room) in [(1 << 62, 0), (1 << 61, 0), ((1 << 62) + 1, 4), (usize::MAX, 4)] {
        let vectors = HeadRows {
            values: &vector[..],
            rows: 4,
            heads,
            head_dim: D,
            row_stride: 0,
            head_stride: 0,
        };
        let queries = Queries { vectors, positions: &positions };
        let kv = KvView {
            cache: &cache[..],
            geometry,
            layer: 0,
            entries: &entries,
            reach: None,
            scales: KvScales::ONE,
        };
        let (mut out, mut lse) = (vec![0.0f32; room * D], vec![0.0f32; room]);
        let (out, lse, offsets) = (&mut out[..], &mut lse[..], &[0, 1, 1, 1, 1][..]);
        let decode = AttendDecode { queries, kv, scoring, entry_offsets: offsets, out, lse };
        assert_eq!(decode.validate().expect_err("a refusal").what(), "out", "{heads}");
        let AttendDecode { out, lse, .. } = decode;
        let (row_offsets, entry_offsets) = (&[0, 4][..], &[0, 1][..]);
        let prefill = AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse };
        assert_eq!(prefill.validate().expect_err("a refusal").what(), "out", "{heads}");
        let edge = Some(EdgeMass { window: 1, sink: 0, share: prefill.lse });
        let mass = &mut [0.0; 4][..];
        let score = ScoreTokens { queries, kv, scoring, entry_offsets, mass, edge };
        assert_eq!(score.validate().expect_err("a refusal").what(), "edge", "{heads}");
    }
}

#[test]
fn bounds_of_a_layer_beyond_all_pages_are_refused() {
    let geometry = PageGeometry {
        head_stride: 0,
        layer_stride: 0,
        block_stride: 0,
        ..PageGeometry::arena(1, 3, 4, D)
    };
    for layer in [usize::MAX, usize::MAX / 3, 1 << 62] {
        let refused = validate_bounds((&[[1, 0, 4]], None), &geometry, layer, 4 * PAGE, 4);
        assert_eq!(refused.expect_err("a refusal").kind(), OpErrorKind::OutOfRange, "{layer}");
    }
}

proptest! {
    #[test]
    fn a_call_without_copies_is_accepted_where_one_block_fits(
        layers in 1usize..4, kv_heads in 1usize..6, pages in 0usize..24,
        source in proptest::option::of(0usize..24),
    ) {
        let geometry = PageGeometry::arena(layers, kv_heads, 4, D);
        let fits = |pages: usize| layers * kv_heads <= pages;
        let accepted = copy_nothing(geometry, pages, source).is_ok();
        prop_assert_eq!(accepted, fits(pages) && source.is_none_or(fits));
    }
}
