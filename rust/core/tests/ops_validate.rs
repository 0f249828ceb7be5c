//! What the ops refuse, and what they say about it.

use kvweave_core::ops::{
    AttendDecode, AttendPrefill, BoundValues, CopyRerotate, CopySource, Fp8E4m3, HeadRows,
    KvScales, KvView, MergeStates, OpError, OpErrorKind, PageBounds, PageGeometry, Pairing,
    Queries, Reach, RopeTable, ScoreTokens, Scoring, WritePages, validate_bounds,
};
use proptest::prelude::*;

const D: usize = 8;
const ONE: KvScales = KvScales::ONE;

/// One layer, two KV heads, P 4; pages 0..8, so blocks 0, 2, 4, 6.
fn geometry() -> PageGeometry {
    PageGeometry::arena(1, 2, 4, D)
}

const ELEMENTS: usize = 8 * 2 * 4 * D;

struct Attend {
    geometry: PageGeometry,
    layer: usize,
    entries: Vec<[i32; 5]>,
    entry_offsets: Vec<i32>,
    row_offsets: Vec<i32>,
    positions: Vec<i32>,
    heads: usize,
    q: usize,
    row_stride: usize,
    scale: f32,
    window: Option<u32>,
    softcap: Option<f32>,
    rope_layers: usize,
    rotary: usize,
    out: usize,
}

fn good() -> Attend {
    Attend {
        geometry: geometry(),
        layer: 0,
        entries: vec![[2, 0, 4, 0, 0], [6, 1, 3, 4, -9], [0, 0, 4, 6, 0]],
        entry_offsets: vec![0, 2, 3],
        row_offsets: vec![0, 1, 3],
        positions: vec![5, 0, i32::MAX],
        heads: 4,
        q: 3 * 4 * D,
        row_stride: 4 * D,
        scale: 0.3,
        window: Some(1),
        softcap: Some(30.0),
        rope_layers: 1,
        rotary: D,
        out: 3 * 4 * D,
    }
}

impl Attend {
    fn validate(&self) -> Result<(), OpError> {
        let cache = vec![0.0f32; ELEMENTS];
        let (q, mut out) = (vec![0.0f32; self.q], vec![0.0f32; self.out]);
        let freq = vec![1.0; self.rope_layers * self.rotary / 2];
        let rope = RopeTable::new(freq, self.rope_layers, Pairing::Half)?;
        let vectors =
            HeadRows { row_stride: self.row_stride, ..HeadRows::contiguous(&q, 3, self.heads, D) };
        let queries = Queries { vectors, positions: &self.positions };
        let (geometry, layer, entries) = (self.geometry, self.layer, &self.entries[..]);
        let kv = KvView { cache: &cache, geometry, layer, entries, reach: None, scales: ONE };
        let (scale, window, softcap) = (self.scale, self.window, self.softcap);
        let scoring = Scoring { scale, rope: &rope, window, softcap };
        let (row_offsets, entry_offsets) = (&self.row_offsets[..], &self.entry_offsets[..]);
        let (out, lse) = (&mut out[..], &mut [0.0; 12][..]);
        AttendPrefill { queries, kv, scoring, row_offsets, entry_offsets, out, lse }.validate()
    }
}

fn refused(change: impl FnOnce(&mut Attend)) -> OpError {
    let mut params = good();
    change(&mut params);
    params.validate().expect_err("a refusal")
}

#[test]
fn good_params_pass() {
    assert_eq!(good().validate(), Ok(()));
}

#[test]
fn attention_refuses() {
    use OpErrorKind::{InvalidArgument, OutOfRange, Overlap, Shape};
    type Change = fn(&mut Attend);
    let cases: [(&str, OpErrorKind, Change); 25] = [
        ("entry block", OutOfRange, |p| p.entries[0][0] = -1),
        ("block", OutOfRange, |p| p.entries[0][0] = 7),
        ("block", OutOfRange, |p| p.entries[0][0] = i32::MAX),
        ("entry slots", OutOfRange, |p| p.entries[0][2] = 5),
        ("entry slots", OutOfRange, |p| p.entries[0][1] = -1),
        ("entry slots", OutOfRange, |p| p.entries[0][1] = 4),
        ("entry position", OutOfRange, |p| p.entries[0][3] = -1),
        ("entry position", OutOfRange, |p| p.entries[2][3] = i32::MAX - 2),
        ("entry position", Overlap, |p| p.entries[1][3] = 3),
        ("layer", OutOfRange, |p| p.layer = 1),
        ("entry_offsets", Shape, |p| p.entry_offsets = vec![0, 2]),
        ("entry_offsets", Shape, |p| p.entry_offsets = vec![0, 4, 3]),
        ("entry_offsets", Shape, |p| p.entry_offsets = vec![]),
        ("row_offsets", Shape, |p| p.row_offsets = vec![0, -1, 3]),
        ("row_offsets", Shape, |p| p.row_offsets = vec![0, 3]),
        ("positions", Shape, |p| p.positions = vec![0]),
        ("positions", OutOfRange, |p| p.positions[1] = -1),
        ("query heads", Shape, |p| p.heads = 3),
        ("q", Shape, |p| p.q -= 1),
        ("q", Shape, |p| p.row_stride = usize::MAX),
        ("out", Shape, |p| p.out += 1),
        ("scale", InvalidArgument, |p| p.scale = f32::NAN),
        ("window", InvalidArgument, |p| p.window = Some(0)),
        ("softcap", InvalidArgument, |p| p.softcap = Some(0.0)),
        ("head_dim", Shape, |p| p.geometry.head_dim = 12),
    ];
    for (what, kind, change) in cases {
        let error = refused(change);
        assert_eq!((error.what(), error.kind()), (what, kind), "{error}");
        assert!(!error.expected().is_empty() && !error.got().is_empty());
    }
    assert_eq!(refused(|p| p.rope_layers = 2).what(), "layers of rope");
    assert_eq!(refused(|p| p.rotary = 10).what(), "rotary_dim");
    assert_eq!(refused(|p| p.geometry.kv_heads = 0).what(), "geometry");
    assert_eq!(refused(|p| p.geometry.block_stride = usize::MAX).what(), "block");
}

#[test]
fn messages_say_expected_and_got() {
    let error = refused(|p| p.entries[0][2] = 5);
    assert_eq!(error.to_string(), "entry slots: expected 0 ≤ begin < end ≤ 4, got [0, 5)");
}

#[test]
fn decode_and_score_check_their_own_shapes() {
    let (cache, q) = (vec![0.0f32; ELEMENTS], [0.0f32; 4 * D]);
    let rope = RopeTable::new(vec![1.0; 4], 1, Pairing::Half).expect("a valid table");
    let entries = [[2, 0, 4, 0, 0]];
    let queries = Queries { vectors: HeadRows::contiguous(&q, 1, 4, D), positions: &[0] };
    let (geometry, reach) = (geometry(), None);
    let kv = KvView { cache: &cache, geometry, layer: 0, entries: &entries, reach, scales: ONE };
    let scoring = Scoring { scale: 1.0, rope: &rope, window: None, softcap: None };
    let decode = |entry_offsets: &[i32], len: usize| {
        let (out, lse) = (&mut vec![0.0; len][..], &mut [0.0; 4][..]);
        AttendDecode { queries, kv, scoring, entry_offsets, out, lse }.validate()
    };
    assert_eq!(decode(&[0, 1], 4 * D), Ok(()));
    assert_eq!(decode(&[0, 0, 1], 4 * D).expect_err("a refusal").what(), "q rows");
    assert_eq!(decode(&[0, 1], 3).expect_err("a refusal").what(), "out");
    let entry_offsets = &[0, 1][..];
    let score = |len: usize| {
        let mass = &mut vec![0.0; len][..];
        ScoreTokens { queries, kv, scoring, entry_offsets, mass, edge: None }.validate()
    };
    assert_eq!(score(4), Ok(()));
    assert_eq!(score(5).expect_err("a refusal").what(), "mass");
}

fn write(slots: &[[i32; 2]]) -> Result<(), OpError> {
    let (mut cache, source) = (vec![0.0f32; ELEMENTS], vec![0.0f32; slots.len() * 2 * D]);
    let rows = HeadRows::contiguous(&source, slots.len(), 2, D);
    let (cache, geometry) = (&mut cache[..], geometry());
    let (keys, values, bounds) = (rows, rows, None);
    WritePages { cache, geometry, layer: 0, scales: ONE, keys, values, slots, reach: None, bounds }
        .validate()
}

fn refresh(held: &[[i32; 3]], pages: usize) -> Result<(), OpError> {
    validate_bounds((held, None), &geometry(), 0, ELEMENTS, pages)
}

#[test]
fn bounds_are_of_slots_within_their_pages() {
    assert_eq!(refresh(&[], 0), Ok(()));
    assert_eq!(refresh(&[[6, 0, 4], [2, 3, 4]], 8), Ok(()));
    for (held, pages, kind, what) in [
        ([[6, 0, 4], [6, 0, 1]], 8, OpErrorKind::Overlap, "held block"),
        ([[2, 0, 1], [3, 0, 1]], 8, OpErrorKind::Overlap, "block"),
        ([[0, 0, 1], [6, 0, 1]], 8, OpErrorKind::OutOfRange, "held block"),
        ([[2, 1, 1], [6, 0, 1]], 8, OpErrorKind::OutOfRange, "held slots"),
        ([[2, 0, 5], [6, 0, 1]], 8, OpErrorKind::OutOfRange, "held slots"),
        ([[2, -1, 2], [6, 0, 1]], 8, OpErrorKind::OutOfRange, "held slots"),
        ([[2, 0, 1], [7, 0, 1]], 9, OpErrorKind::OutOfRange, "block"),
        ([[2, 0, 1], [6, 0, 1]], 7, OpErrorKind::OutOfRange, "bounds"),
        ([[2, 0, 1], [i32::MAX, 0, 1]], 8, OpErrorKind::OutOfRange, "block"),
    ] {
        let error = refresh(&held, pages).expect_err("a refusal");
        assert_eq!((error.kind(), error.what()), (kind, what), "{held:?}");
    }
    let apart = PageGeometry { block_stride: 1, ..geometry() };
    let error = validate_bounds((&[], None), &apart, 0, ELEMENTS, 1).expect_err("a refusal");
    assert_eq!(error.what(), "geometry");
}

#[test]
fn writes_stay_in_range_and_apart() {
    assert_eq!(write(&[]), Ok(()));
    assert_eq!(write(&[[6, 3], [2, 0], [6, 0]]), Ok(()));
    for (slots, kind) in [
        ([[6, 3], [6, 3]], OpErrorKind::Overlap),
        // Blocks 2 and 3 share a page where a block has two.
        ([[2, 0], [3, 1]], OpErrorKind::Overlap),
        ([[1, 0], [4, 0]], OpErrorKind::Overlap),
        ([[0, 0], [4, 0]], OpErrorKind::OutOfRange),
        ([[-2, 0], [4, 0]], OpErrorKind::OutOfRange),
        ([[2, 4], [4, 0]], OpErrorKind::OutOfRange),
        ([[2, -1], [4, 0]], OpErrorKind::OutOfRange),
        ([[2, 0], [7, 0]], OpErrorKind::OutOfRange),
    ] {
        assert_eq!(write(&slots).expect_err("a refusal").kind(), kind, "{slots:?}");
    }
}

fn copy(geometry: PageGeometry, len: usize, copies: &[[i32; 6]]) -> Result<(), OpError> {
    let mut cache = vec![0.0f32; len];
    let rope = RopeTable::new(vec![1.0; 4 * geometry.layers], geometry.layers, Pairing::Half)?;
    CopyRerotate { cache: &mut cache, geometry, source: None, copies, rope: &rope, layers: None }
        .validate()
}

#[test]
fn copies_stay_in_range_and_apart() {
    let run = |copies: &[[i32; 6]]| copy(geometry(), ELEMENTS, copies);
    assert_eq!(run(&[]), Ok(()));
    assert_eq!(run(&[[2, 0, 4, 1, 2, 7], [2, 0, 4, 3, 1, i32::MIN], [0, 0, 6, 0, 4, 1]]), Ok(()));
    for (copies, kind) in [
        ([[2, 0, 4, 1, 2, 7], [2, 0, 4, 2, 1, 0]], OpErrorKind::Overlap),
        ([[2, 0, 4, 0, 1, 7], [4, 3, 6, 0, 1, 0]], OpErrorKind::Overlap),
        ([[2, 0, 2, 2, 1, 7], [4, 3, 6, 0, 1, 0]], OpErrorKind::Overlap),
        ([[2, 0, 3, 2, 1, 7], [4, 3, 6, 0, 1, 0]], OpErrorKind::Overlap),
        ([[2, 0, 0, 0, 1, 7], [4, 3, 6, 0, 1, 0]], OpErrorKind::OutOfRange),
        ([[-2, 0, 6, 0, 1, 7], [2, 3, 4, 0, 1, 0]], OpErrorKind::OutOfRange),
        ([[2, 0, 6, 0, 0, 7], [2, 3, 4, 0, 1, 0]], OpErrorKind::OutOfRange),
        ([[2, 3, 6, 0, 2, 7], [2, 3, 4, 0, 1, 0]], OpErrorKind::OutOfRange),
        ([[2, 0, 6, 0, i32::MAX, 7], [2, 3, 4, 0, 1, 0]], OpErrorKind::OutOfRange),
        ([[2, 0, 7, 0, 1, 7], [2, 3, 4, 0, 1, 0]], OpErrorKind::OutOfRange),
    ] {
        assert_eq!(run(&copies).expect_err("a refusal").kind(), kind, "{copies:?}");
    }
}

#[test]
fn copies_from_another_tensor_stay_in_range_there() {
    let rope = RopeTable::new(vec![1.0; 4 * geometry().layers], geometry().layers, Pairing::Half)
        .expect("a valid table");
    let run = |of_source: PageGeometry, len: usize, copies: &[[i32; 6]]| {
        let (mut cache, pages) = (vec![0.0f32; ELEMENTS], vec![0.0f32; len]);
        let source = Some(CopySource { pages: &pages, geometry: of_source });
        let (geometry, cache, rope) = (geometry(), &mut cache, &rope);
        CopyRerotate { cache, geometry, source, copies, rope, layers: None }.validate()
    };
    let same = geometry();
    let small = PageGeometry::arena(same.layers, same.kv_heads, 2, same.head_dim);
    // A block may be read there and written here.
    assert_eq!(run(same, ELEMENTS, &[[2, 0, 2, 1, 2, 7], [4, 0, 4, 0, 4, 0]]), Ok(()));
    assert_eq!(run(small, ELEMENTS, &[[2, 0, 2, 2, 2, 7]]), Ok(()));
    let other = |of: fn(&mut PageGeometry)| {
        let mut geometry = same;
        of(&mut geometry);
        geometry
    };
    for (of_source, len, copy, kind) in [
        (same, ELEMENTS - 1, [6, 0, 2, 0, 1, 7], OpErrorKind::OutOfRange),
        (small, ELEMENTS, [2, 1, 2, 2, 2, 7], OpErrorKind::OutOfRange),
        (small, ELEMENTS, [2, 0, 2, 3, 2, 7], OpErrorKind::OutOfRange),
        (same, ELEMENTS, [-1, 0, 2, 3, 1, 7], OpErrorKind::OutOfRange),
        (same, ELEMENTS, [2, 0, 7, 0, 1, 7], OpErrorKind::OutOfRange),
        (other(|of| of.head_dim = 16), ELEMENTS, [2, 0, 2, 0, 1, 7], OpErrorKind::Shape),
        (other(|of| of.kv_heads = 1), ELEMENTS, [2, 0, 2, 0, 1, 7], OpErrorKind::Shape),
        (other(|of| of.layers += 1), ELEMENTS, [2, 0, 2, 0, 1, 7], OpErrorKind::Shape),
        (other(|of| of.page_tokens = 0), ELEMENTS, [2, 0, 2, 0, 1, 7], OpErrorKind::Shape),
    ] {
        let refused = run(of_source, len, &[copy]).expect_err("a refusal");
        assert_eq!(refused.kind(), kind, "{of_source:?} {copy:?}");
    }
}

#[test]
fn engine_layouts_are_accepted_and_aliasing_strides_refused() {
    // Keys and values in two halves, layers outermost: [L, 2, N, G, P, D].
    let (blocks, page) = (5, 4 * D);
    let engine = PageGeometry {
        layers: 3,
        kv_heads: 2,
        page_tokens: 4,
        head_dim: D,
        block_stride: 2 * page,
        layer_stride: 2 * blocks * 2 * page,
        head_stride: page,
        token_stride: D,
        value_offset: blocks * 2 * page,
    };
    let len = 3 * engine.layer_stride;
    let copies = [[1, 0, 2, 0, 4, 5], [3, 0, 4, 0, 4, 5]];
    assert_eq!(copy(engine, len, &copies), Ok(()));
    assert_eq!(copy(engine, len - 1, &copies).expect_err("short").kind(), OpErrorKind::OutOfRange);
    let folded = PageGeometry { token_stride: D - 1, ..engine };
    assert_eq!(copy(folded, len, &copies).expect_err("aliasing").kind(), OpErrorKind::Overlap);
}

#[test]
fn merge_checks_every_length() {
    let merge = |splits: usize, states: usize, outs: usize, lses: usize| {
        let (outs, lses) = (vec![0.0f32; outs], vec![0.0f32; lses]);
        let (out, lse) = (&mut [0.0; 16][..], &mut [0.0; 2][..]);
        MergeStates { outs: &outs, lses: &lses, splits, states, head_dim: D, out, lse }.validate()
    };
    assert_eq!(merge(3, 2, 48, 6), Ok(()));
    for (splits, states, outs, lses) in
        [(0, 2, 0, 0), (3, 2, 47, 6), (3, 2, 48, 7), (3, 1, 24, 3), (usize::MAX, 2, 48, 6)]
    {
        assert_eq!(
            merge(splits, states, outs, lses).expect_err("a refusal").kind(),
            OpErrorKind::Shape
        );
    }
}

#[test]
fn rope_tables_are_checked_and_know_equal_layers() {
    let table = |freq: &[f32], layers| RopeTable::new(freq.to_vec(), layers, Pairing::Half);
    assert_eq!(table(&[1.0; 5], 2).expect_err("a refusal").kind(), OpErrorKind::Shape);
    assert_eq!(table(&[1.0; 5], 0).expect_err("a refusal").kind(), OpErrorKind::Shape);
    let error = table(&[1.0, f32::INFINITY], 1).expect_err("a refusal");
    assert_eq!(error.kind(), OpErrorKind::InvalidArgument);
    let rope = table(&[1.0, 0.5, 0.2, 0.1, 1.0, 0.5], 3).expect("a valid table");
    assert_eq!([0, 1, 2].map(|layer| rope.first_alike(layer)), [0, 1, 0]);
    assert_eq!((rope.layers(), rope.pairs(), rope.inv_freq(1)), (3, 2, &[0.2, 0.1][..]));
}

proptest! {
    /// Whatever the numbers, validation answers: it neither panics nor overflows.
    #[test]
    fn any_numbers_are_answered(
        entry in prop::array::uniform5(any::<i32>()),
        copies in prop::array::uniform6(any::<i32>()),
        slot in prop::array::uniform2(any::<i32>()),
        strides in prop::array::uniform5(any::<usize>()),
        offsets in prop::collection::vec(any::<i32>(), 0..4),
    ) {
        let mut params = good();
        params.entries[1] = entry;
        params.entry_offsets = offsets;
        params.geometry.block_stride = strides[0];
        let _ = params.validate();
        let [block_stride, layer_stride, head_stride, token_stride, value_offset] = strides;
        let wild = PageGeometry {
            block_stride, layer_stride, head_stride, token_stride, value_offset, ..geometry()
        };
        let _ = copy(wild, ELEMENTS, &[copies]);
        let _ = copy(geometry(), ELEMENTS, &[copies]);
        let _ = write(&[slot, [2, 0]]);
    }
}

/// Rows of two heads through the tables of a reach, over the same seven pages.
fn write_reached(
    reach: Reach<'_>,
    slots: &[[i32; 2]],
    bounds: Option<PageBounds<'_>>,
) -> Result<(), OpError> {
    let (mut cache, source) = (vec![0.0f32; ELEMENTS], vec![0.0f32; 2 * 2 * D]);
    let rows = HeadRows::contiguous(&source, 2, 2, D);
    let call = WritePages {
        cache: &mut cache,
        geometry: geometry(),
        layer: 0,
        scales: ONE,
        keys: rows,
        values: rows,
        slots,
        reach: Some(reach),
        bounds,
    };
    call.validate()
}

/// Rows of two tables, for heads `[table, rank]`.
fn write_through(heads: [[i32; 2]; 2], slots: [[[i32; 2]; 2]; 2]) -> Result<(), OpError> {
    let heads = heads.map(|[table, rank]| [table, rank, 5, 1]);
    write_reached(Reach { tables: 2, heads: &heads }, slots.as_flattened(), None)
}

#[test]
fn heads_are_written_in_pages_of_their_own() {
    let kept = [[[2, 3], [2, 0]], [[4, 3], [-1, -1]]];
    assert_eq!(write_through([[0, 0], [1, 0]], kept), Ok(()));
    assert_eq!(write_through([[0, 0], [0, 1]], kept), Ok(()), "nobody has the second table");
    assert_eq!(write_through([[0, 1], [1, 3]], kept), Ok(()), "pages 3 and 7");
    // Pages are apart, though blocks of two pages from 2 and from 3 on would not be.
    assert_eq!(write_through([[0, 0], [1, 2]], [[[2, 0], [3, 0]], [[2, 0], [3, 0]]]), Ok(()));
    let none = [[-1, 0], [-1, 9]];
    assert_eq!(write_through([[0, 0], [0, 0]], [none, none]), Ok(()));
    for (heads, slots, kind, what) in [
        ([[0, 0], [0, 0]], kept, OpErrorKind::Overlap, "slots"),
        ([[0, 2], [1, 0]], kept, OpErrorKind::Overlap, "slots"),
        ([[0, 0], [1, 0]], [[[2, 3], [2, 3]], none], OpErrorKind::Overlap, "slots"),
        ([[0, 0], [1, 0]], [[[2, 3], [-2, 0]], none], OpErrorKind::OutOfRange, "slot block"),
        ([[0, 0], [1, 0]], [none, [[0, 3], [4, 0]]], OpErrorKind::OutOfRange, "slot block"),
        ([[0, 0], [1, 0]], [none, [[4, 4], [4, 0]]], OpErrorKind::OutOfRange, "slot"),
        ([[0, 0], [1, 0]], [none, [[4, -1], [4, 0]]], OpErrorKind::OutOfRange, "slot"),
        ([[0, 0], [1, 4]], kept, OpErrorKind::OutOfRange, "rank of a head"),
        ([[0, i32::MAX], [1, 0]], kept, OpErrorKind::OutOfRange, "rank of a head"),
        ([[0, 0], [1, -1]], kept, OpErrorKind::OutOfRange, "rank of a head"),
        ([[0, 0], [2, 0]], kept, OpErrorKind::OutOfRange, "table of a head"),
        ([[-1, 0], [1, 0]], kept, OpErrorKind::OutOfRange, "table of a head"),
        ([[0, 0], [1, 0]], [none, [[i32::MAX, 0]; 2]], OpErrorKind::Overlap, "slots"),
        ([[0, 0], [1, 0]], [none, [[8, 0], [1, 0]]], OpErrorKind::OutOfRange, "rank of a head"),
    ] {
        let error = write_through(heads, slots).expect_err("a refusal");
        assert_eq!((error.kind(), error.what()), (kind, what), "{heads:?} {slots:?}");
    }
}

#[test]
fn a_reach_and_its_slots_belong_together() {
    let mut bounds = vec![0.0f32; 8 * 3 * D];
    let mut refusal = |tables: usize, heads: &[[i32; 4]], slots: &[[i32; 2]], bounded: bool| {
        let values = BoundValues::F32(&mut bounds);
        let bounds = bounded.then_some(PageBounds { values, held: &[], rows: None });
        let error = write_reached(Reach { tables, heads }, slots, bounds).expect_err("a refusal");
        (error.kind(), error.what())
    };
    let heads = [[0, 0, 0, 0], [0, 1, 0, 0]];
    let slots = [[2, 0], [2, 1], [4, 0], [4, 1]];
    assert_eq!(refusal(2, &heads, &slots[..2], false), (OpErrorKind::Shape, "slots"));
    assert_eq!(refusal(1, &heads, &slots, false), (OpErrorKind::Shape, "slots"));
    assert_eq!(refusal(0, &heads, &[], false), (OpErrorKind::Shape, "tables of reach"));
    assert_eq!(refusal(1, &heads[..1], &slots[..2], false), (OpErrorKind::Shape, "heads of reach"));
    assert_eq!(refusal(2, &heads, &slots, true), (OpErrorKind::Unsupported, "bounds"));
}

fn copy_group(layers: &[i32], copies: &[[i32; 6]]) -> Result<(), OpError> {
    let mut cache = vec![0.0f32; ELEMENTS];
    let geometry = PageGeometry { layers: 3, ..geometry() };
    let rope = RopeTable::new(vec![1.0; 4 * 3], 3, Pairing::Half)?;
    CopyRerotate {
        cache: &mut cache,
        geometry,
        source: None,
        copies,
        rope: &rope,
        layers: Some(layers),
    }
    .validate()
}

#[test]
fn blocks_of_a_head_group_have_as_many_pages_as_layers_are_told() {
    let one = [[2, 0, 3, 1, 2, 7]];
    assert_eq!(copy_group(&[2], &one), Ok(()));
    assert_eq!(copy_group(&[2], &[[1, 0, 7, 0, 4, 7]]), Ok(()));
    assert_eq!(copy_group(&[0, 0], &[[2, 0, 5, 1, 2, 7]]), Ok(()));
    for (layers, copies, kind, what) in [
        (&[0, 1][..], one, OpErrorKind::Overlap, "block"),
        (&[0, 1], [[1, 0, 4, 0, 4, 7]], OpErrorKind::Overlap, "block"),
        (&[2, 0, 2], [[3, 0, 5, 1, 2, 7]], OpErrorKind::Overlap, "block"),
        (&[0, 1], [[2, 0, 7, 0, 4, 7]], OpErrorKind::OutOfRange, "block"),
        (&[], one, OpErrorKind::Shape, "layers"),
        (&[3], one, OpErrorKind::OutOfRange, "layers"),
        (&[-1], one, OpErrorKind::OutOfRange, "layers"),
        (&[1, 0, 1, 1], [[0, 0, 4, 0, 4, 7]], OpErrorKind::OutOfRange, "layers"),
    ] {
        let error = copy_group(layers, &copies).expect_err("a refusal");
        assert_eq!((error.kind(), error.what()), (kind, what), "{layers:?} {copies:?}");
    }
}

#[test]
fn scales_are_for_fp8_caches() {
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY, -0.0] {
        for scales in [KvScales { key: wrong, value: 1.0 }, KvScales { key: 1.0, value: wrong }] {
            let error = scales.validate(true).expect_err("a refusal");
            assert_eq!(error.kind(), OpErrorKind::InvalidArgument, "{wrong}");
            assert!(error.what().ends_with("scale") && error.got() == wrong.to_string());
        }
    }
    let scales = KvScales { key: 0.5, value: 1.0 };
    assert!(scales.validate(true).is_ok() && ONE.validate(false).is_ok());
    assert_eq!(scales.validate(false).expect_err("a refusal").what(), "scales");

    let cache = vec![Fp8E4m3::default(); ELEMENTS];
    let (geometry, entries) = (geometry(), &[[2, 0, 4, 0, 0]][..]);
    let q = [0.0f32; 2 * D];
    let decode = |key: f32, scale: f32| {
        let queries = Queries { vectors: HeadRows::contiguous(&q, 1, 2, D), positions: &[3] };
        let scales = KvScales { key, value: 2.0 };
        let kv = KvView { cache: &cache, geometry, layer: 0, entries, reach: None, scales };
        let rope = RopeTable::new(vec![1.0; 4], 1, Pairing::Half)?;
        let scoring = Scoring { scale, rope: &rope, window: None, softcap: None };
        let (out, lse) = (&mut [0.0; 2 * D][..], &mut [0.0; 2][..]);
        AttendDecode { queries, kv, scoring, entry_offsets: &[0, 1], out, lse }.validate()
    };
    assert!(decode(1e30, 1.0).is_ok());
    assert_eq!(decode(1e30, 1e30).expect_err("a refusal").what(), "scale · key scale");
    assert_eq!(decode(0.0, 1.0).expect_err("a refusal").what(), "key scale");
}
