//! Packed pages: the fast versions write the definition's bytes, and attend as it does.

use kvweave_core::ops::{
    AttendPacked, Bases, HeadRows, KeptNumbers, OpError, OpErrorKind, PackLosses, PackPages,
    PackedFormat, PackedKind, PackedKv, Packs, Pairing, Queries, RopeTable, ScaleDtype, Scoring,
    TopR, UnpackPages,
};
use proptest::prelude::*;

use crate::paged::Random;

const PAGE: usize = 8;
const HEADS: usize = 2;

fn formats() -> impl Strategy<Value = PackedFormat> {
    let scales = prop_oneof![Just(ScaleDtype::Bf16), Just(ScaleDtype::F16)];
    let sizes = (prop::sample::select(vec![16, 48, 64]), prop::sample::select(vec![16, 64, 80]));
    let numbers = vec![KeptNumbers::Bf16, KeptNumbers::Fp8, KeptNumbers::Int4];
    // Of four channels: those left out at the end, and those kept of the others.
    let kept = (prop::sample::select(numbers), prop::sample::select(vec![1, 2, 4]), 0..2, 1..4);
    (scales, sizes, 0..6, kept).prop_map(|(scales, (tokens, dim), kind, kept)| {
        let (numbers, group, cut, share) = kept;
        let kind = match kind {
            0 => PackedKind::Int4,
            1 => PackedKind::Int8,
            2 | 3 => PackedKind::Planes(dim / 2 * share as usize),
            _ => {
                let channels = dim - cut as usize * dim / 4;
                let kept = (channels * share as usize / 4).next_multiple_of(4);
                PackedKind::TopR(TopR { kept, group, channels, numbers })
            }
        };
        PackedFormat::new(kind, scales, tokens, dim).expect("sound sizes")
    })
}

/// Two bases, and which of them each page has; nothing for INT4 and INT8 pages. Directions are any,
/// about 1 long, so that what is packed stays as large as it was.
struct Given {
    data: Vec<f32>,
    of: Vec<i32>,
}

impl Given {
    fn new(format: &PackedFormat, pages: usize, random: &mut Random) -> Option<Self> {
        let dim = format.head_dim();
        let half = format.basis_rows()? * dim;
        let length = (dim as f32 / 3.0).sqrt();
        let mut data: Vec<f32> =
            (0..2 * HEADS * 2 * half).map(|_| random.unit() / length).collect();
        if let Some(page) = format.planes() {
            for side in data.chunks_exact_mut(half) {
                // As many channels of 8, 4 and 2 bits as half of the bytes has room for.
                let mut left = page.token_bytes() / 2;
                for (group, bits) in side[dim..2 * dim].chunks_exact_mut(4).enumerate() {
                    let of = [8u8, 4, 4, 2, 2, 2][(group * 3 * 4 / dim * 2).min(5)];
                    let fits = usize::from(of) / 2 <= left;
                    left = if fits { left - usize::from(of) / 2 } else { 0 };
                    bits.fill(if fits { f32::from(of) } else { 0.0 });
                }
            }
        }
        Some(Self { data, of: (0..pages).map(|page| page as i32 / 2 % 2).collect() })
    }

    fn bases(given: Option<&Self>) -> Option<Bases<'_>> {
        given.map(|given| Bases { data: &given.data, pages: HEADS, of: &given.of })
    }
}

/// Exact pages of as many blocks as `tokens` fill, and where they are packed to.
fn text(format: &PackedFormat, tokens: usize, random: &mut Random) -> (Vec<f32>, Vec<i32>) {
    let (whole, dim) = (format.page_tokens(), format.head_dim());
    let (count, each) = (tokens.div_ceil(whole), whole / PAGE);
    let pages = HEADS * (count * each + 1);
    let cache = (0..pages * 2 * PAGE * dim).map(|_| 3.0 * random.unit()).collect();
    let rows = (0..count).flat_map(|i| {
        let held = whole.min(tokens - i * whole);
        let sources = (0..each).map(move |part| (HEADS * (1 + i * each + part)) as i32);
        [(HEADS * (count - i)) as i32, held as i32].into_iter().chain(sources)
    });
    (cache, rows.collect())
}

proptest! {
    #[test]
    fn the_fast_versions_are_their_definitions(
        format in formats(),
        tokens in 1..200usize,
        odd in any::<Option<u16>>(),
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        let (mut cache, rows) = text(&format, tokens, &mut random);
        if let Some(at) = odd {
            let at = usize::from(at) % cache.len();
            cache[at] = f32::NAN;
        }
        let blocks = tokens.div_ceil(format.page_tokens()) + 1;
        let given = Given::new(&format, HEADS * blocks, &mut random);
        let bases = Given::bases(given.as_ref());
        let packs = Packs { format, page_tokens: PAGE, pages: HEADS, bases, rows: &rows };
        let bytes = HEADS * blocks * format.page_bytes();
        let mut packed = [0x5A, 0xA5].map(|poison| vec![poison; bytes]);
        let [wanted, got] = &mut packed;
        kvweave_reference::pack_pages(PackPages { cache: &cache, packed: wanted, packs }).unwrap();
        kvweave_cpu::pack_pages(PackPages { cache: &cache, packed: got, packs }).unwrap();
        let first = HEADS * format.page_bytes();
        prop_assert_eq!(&wanted[first..], &got[first..]);

        let mut back = [vec![7.0f32; cache.len()], vec![7.0f32; cache.len()]];
        let [one, other] = &mut back;
        let packed = &wanted[..];
        let unpacked = |cache| UnpackPages { cache, packed, packs, in_basis: false };
        kvweave_reference::unpack_pages(unpacked(one)).unwrap();
        kvweave_cpu::unpack_pages(unpacked(other)).unwrap();
        let bits = |cache: &[f32]| cache.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(one), bits(other));
    }

    #[test]
    fn losses_are_the_definitions(
        format in formats(),
        tokens in 1..200usize,
        left_out in 0..9usize,
        (some, turned, odd) in (any::<bool>(), any::<bool>(), any::<Option<u16>>()),
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        let (mut cache, rows) = text(&format, tokens, &mut random);
        if let Some(at) = odd {
            let at = usize::from(at) % cache.len();
            cache[at] = f32::INFINITY;
        }
        let ranks: &[i32] = if some { &[1] } else { &[0, 1] };
        let (dim, count) = (format.head_dim(), ranks.len());
        let given = Given::new(&format, 1, &mut random);
        let basis = given.as_ref().map(|given| {
            &given.data[..given.data.len() / 2 / HEADS * count]
        });
        let roots: Vec<f64> = (0..count * dim * dim).map(|_| random.unit().into()).collect();
        let bytes = tokens.div_ceil(format.page_tokens()) * count * format.page_bytes();
        let packs = Packs { format, page_tokens: PAGE, pages: HEADS, bases: None, rows: &rows };
        let [(wanted, pages), (got, others)] =
            [kvweave_reference::pack_losses::<f32>, kvweave_cpu::pack_losses::<f32>].map(|run| {
                let (mut sums, mut packed) = (vec![7.0; 4 * count], vec![0x5A; bytes]);
                run(PackLosses {
                    cache: &cache,
                    packs,
                    ranks,
                    basis,
                    roots: turned.then_some(&roots[..]),
                    left_out,
                    packed: (tokens % 2 == 0).then_some(&mut packed[..]),
                    sums: &mut sums,
                })
                .unwrap();
                (sums, packed)
            });
        prop_assert_eq!(pages, others);
        for (wanted, got) in wanted.into_iter().zip(got) {
            let near = (wanted - got).abs() <= 1e-9 * wanted.abs();
            let alike = near || wanted == got || wanted.is_nan() && got.is_nan();
            prop_assert!(alike, "{wanted} {got}");
        }
    }

    #[test]
    fn attention_is_the_definitions(
        format in formats(),
        tokens in 1..300usize,
        position in 0..300i32,
        window in 0..90u32,
        delta in -9..9i32,
        seed in any::<u64>(),
    ) {
        let mut random = Random(seed);
        let (cache, rows) = text(&format, tokens, &mut random);
        let blocks = tokens.div_ceil(format.page_tokens()) + 1;
        let given = Given::new(&format, HEADS * blocks, &mut random);
        let bases = Given::bases(given.as_ref());
        let packs = Packs { format, page_tokens: PAGE, pages: HEADS, bases, rows: &rows };
        let mut packed = vec![0; HEADS * blocks * format.page_bytes()];
        kvweave_cpu::pack_pages(PackPages { cache: &cache, packed: &mut packed, packs }).unwrap();
        let mut at = 0;
        let entries: Vec<[i32; 5]> = packs
            .iter()
            .map(|pack| {
                let first = at;
                at += pack.tokens as i32;
                [pack.block as i32, 0, pack.tokens as i32, first, if first > 0 { delta } else { 0 }]
            })
            .collect();
        let dim = format.head_dim();
        let rope = RopeTable::new(vec![0.3; dim / 2], 1, Pairing::Half).unwrap();
        let q: Vec<f32> = (0..3 * HEADS * dim).map(|_| random.unit()).collect();
        let attend = |run: fn(AttendPacked<'_, f32>) -> Result<(), OpError>| {
            let (mut out, mut lse) = (vec![9.0; q.len()], vec![9.0; 3 * HEADS]);
            run(AttendPacked {
                queries: Queries {
                    vectors: HeadRows::contiguous(&q, 1, 3 * HEADS, dim),
                    positions: &[position],
                },
                kv: PackedKv {
                    packed: &packed,
                    format,
                    layers: 1,
                    kv_heads: HEADS,
                    layer: 0,
                    entries: &entries,
                    reach: None,
                    bases,
                },
                scoring: Scoring {
                    scale: 0.2,
                    rope: &rope,
                    window: (window > 0).then_some(window),
                    softcap: None,
                },
                entry_offsets: &[0, entries.len() as i32],
                out: &mut out,
                lse: &mut lse,
            })
            .unwrap();
            (out, lse)
        };
        let wanted = attend(kvweave_reference::attend_packed);
        let got = attend(kvweave_cpu::attend_packed);
        for (a, b) in wanted.0.iter().chain(&wanted.1).zip(got.0.iter().chain(&got.1)) {
            prop_assert!(a == b || (a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{a} {b}");
        }
    }
}

#[test]
fn pages_that_are_none_are_refused_and_stay() {
    let format = PackedFormat::new(PackedKind::Int4, ScaleDtype::Bf16, 16, 16).unwrap();
    let cache = vec![1.0f32; 6 * 2 * PAGE * 16];
    let cases: [(&[i32], OpErrorKind); 5] = [
        (&[0, 16, 2, 4], OpErrorKind::OutOfRange),
        (&[2, 17, 2, 4], OpErrorKind::OutOfRange),
        (&[2, 16, 2, 5], OpErrorKind::OutOfRange),
        (&[2, 16, 2], OpErrorKind::Shape),
        (&[2, 16, 2, 4, 3, 16, 2, 4], OpErrorKind::Overlap),
    ];
    for (rows, kind) in cases {
        let packs = Packs { format, page_tokens: PAGE, pages: HEADS, bases: None, rows };
        for run in [kvweave_reference::pack_pages::<f32>, kvweave_cpu::pack_pages::<f32>] {
            let mut packed = vec![0x5A; 6 * format.page_bytes()];
            let refused = run(PackPages { cache: &cache, packed: &mut packed, packs });
            assert_eq!(refused.expect_err("a row that is none").kind(), kind, "{rows:?}");
            assert!(packed.iter().all(|&byte| byte == 0x5A));
        }
    }
}
