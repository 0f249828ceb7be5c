//! Sizes that no memory has: refused before anything is allocated or multiplied by them.

use kvweave_core::ops::{
    CopyRerotate, CopySource, OpError, OpErrorKind, PageGeometry, Pairing, RopeTable,
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
        for wrong in [geometry, spread] {
            let refused = copy_nothing(wrong, 8, None).expect_err("a refusal").kind();
            let expected = [OpErrorKind::OutOfRange, OpErrorKind::Overlap];
            assert!(expected.contains(&refused), "{kv_heads}: {refused:?}");
        }
    }
    let unmoved = PageGeometry { head_stride: 0, ..PageGeometry::arena(1, 1 << 31, 4, D) };
    assert_eq!(copy_nothing(unmoved, 8, None).expect_err("alias").kind(), OpErrorKind::Overlap);
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
