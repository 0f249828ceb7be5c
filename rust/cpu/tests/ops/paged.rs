//! Random paged requests, and the ops of a backend behind one trait.
//!
//! Everything a row may not read is NaN: unused slots, other layers, padding between rows of q.

use kvweave_core::ops::{
    AttendDecode, AttendPrefill, Cached, CopyRerotate, EdgeMass, Element, HeadRows, KvScales,
    KvView, MergeStates, OpError, PageGeometry, Pairing, Queries, Reach, RopeTable, RotateRows,
    ScoreTokens, Scoring, WritePages,
};

/// A backend under test.
pub trait Backend {
    fn attend_prefill<T: Element, C: Element>(
        params: AttendPrefill<'_, T, C>,
    ) -> Result<(), OpError>;
    fn attend_decode<T: Element, C: Element>(params: AttendDecode<'_, T, C>)
    -> Result<(), OpError>;
    fn score_tokens<T: Element, C: Element>(params: ScoreTokens<'_, T, C>) -> Result<(), OpError>;
    fn merge_states<T: Element>(params: MergeStates<'_, T>) -> Result<(), OpError>;
    fn copy_rerotate<T: Element>(params: CopyRerotate<'_, T>) -> Result<(), OpError>;
    fn rotate_rows<T: Element>(params: RotateRows<'_, T>) -> Result<(), OpError>;
    fn write_pages<T: Element, C: Cached<T>>(params: WritePages<'_, T, C>) -> Result<(), OpError>;
}

macro_rules! backend {
    ($name:ident, $crate_name:ident) => {
        pub struct $name;

        impl Backend for $name {
            fn attend_prefill<T: Element, C: Element>(
                params: AttendPrefill<'_, T, C>,
            ) -> Result<(), OpError> {
                $crate_name::attend_prefill(params)
            }
            fn attend_decode<T: Element, C: Element>(
                params: AttendDecode<'_, T, C>,
            ) -> Result<(), OpError> {
                $crate_name::attend_decode(params)
            }
            fn score_tokens<T: Element, C: Element>(
                params: ScoreTokens<'_, T, C>,
            ) -> Result<(), OpError> {
                $crate_name::score_tokens(params)
            }
            fn merge_states<T: Element>(params: MergeStates<'_, T>) -> Result<(), OpError> {
                $crate_name::merge_states(params)
            }
            fn copy_rerotate<T: Element>(params: CopyRerotate<'_, T>) -> Result<(), OpError> {
                $crate_name::copy_rerotate(params)
            }
            fn rotate_rows<T: Element>(params: RotateRows<'_, T>) -> Result<(), OpError> {
                $crate_name::rotate_rows(params)
            }
            fn write_pages<T: Element, C: Cached<T>>(
                params: WritePages<'_, T, C>,
            ) -> Result<(), OpError> {
                $crate_name::write_pages(params)
            }
        }
    };
}

backend!(Reference, kvweave_reference);
backend!(Cpu, kvweave_cpu);

/// A small deterministic generator (SplitMix64), so that a seed is a whole case.
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// In [−1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn values<T: Element>(&mut self, len: usize) -> Vec<T> {
        (0..len).map(|_| T::from_f32(self.unit())).collect()
    }

    pub fn shuffle<X>(&mut self, items: &mut [X]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

/// The shape of a case.
#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub head_dim: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub page_tokens: usize,
    /// Tokens of each request.
    pub lens: Vec<usize>,
    /// Rows of each request.
    pub rows: Vec<usize>,
    pub window: Option<u32>,
    pub softcap: Option<f32>,
    pub interleaved: bool,
    /// Deltas that entries draw from.
    pub deltas: Vec<i32>,
    /// Whether entries start and end inside blocks.
    pub ragged: bool,
}

/// A cache of `C`, the requests that read it and their rows of `T`.
#[derive(Clone)]
pub struct World<T, C = T> {
    pub geometry: PageGeometry,
    pub layer: usize,
    pub heads: usize,
    pub cache: Vec<C>,
    pub scales: KvScales,
    pub entries: Vec<[i32; 5]>,
    pub entry_offsets: Vec<i32>,
    pub positions: Vec<i32>,
    pub row_offsets: Vec<i32>,
    pub q: Vec<T>,
    pub row_stride: usize,
    pub head_stride: usize,
    pub rope: RopeTable,
    pub scale: f32,
    pub window: Option<u32>,
    pub softcap: Option<f32>,
    /// Rows of a reach, where the world has one.
    pub reach: Option<WorldReach>,
}

/// A reach and who owns its rows.
#[derive(Clone, Debug)]
pub struct WorldReach {
    pub tables: usize,
    pub heads: Vec<[i32; 4]>,
}

pub const LAYERS: usize = 2;

impl<T: Element, C: Element> World<T, C> {
    pub fn new(case: &Case) -> Self {
        let mut random = Random(case.seed);
        let (dim, page) = (case.head_dim, case.page_tokens);
        let geometry = PageGeometry::arena(LAYERS, case.kv_heads, page, dim);
        let rope = rope_table(case, &mut random);
        let (mut entries, mut entry_offsets) = (Vec::new(), vec![0]);
        for &len in &case.lens {
            entries.extend(cut_randomly(len, case, &mut random));
            entry_offsets.push(entries.len() as i32);
        }
        let group_pages = LAYERS * case.kv_heads;
        let mut blocks: Vec<i32> =
            (1..=entries.len()).map(|block| (block * group_pages) as i32).collect();
        random.shuffle(&mut blocks);
        entries.iter_mut().zip(blocks).for_each(|(entry, block)| entry[0] = block);
        let len = (entries.len() + 1) * group_pages * geometry.block_stride;
        let cache = vec![C::from_f32(f32::NAN); len];
        let scales = if C::QUANTISED { KvScales { key: 0.7, value: 3.0 } } else { KvScales::ONE };
        let (mut positions, mut row_offsets) = (Vec::new(), vec![0]);
        for (&rows, &len) in case.rows.iter().zip(&case.lens) {
            positions.extend((0..rows).map(|_| random.below(len + 2) as i32));
            row_offsets.push(positions.len() as i32);
        }
        let heads = case.kv_heads * case.group;
        let head_stride = dim + random.below(3);
        let row_stride = heads * head_stride + random.below(5);
        let scale = (dim as f32).powf(-0.5) * 3.0;
        let (window, softcap) = (case.window, case.softcap);
        let mut world = Self {
            geometry,
            layer: 1,
            heads,
            cache,
            scales,
            entries,
            entry_offsets,
            positions,
            row_offsets,
            q: Vec::new(),
            row_stride,
            head_stride,
            rope,
            scale,
            window,
            softcap,
            reach: None,
        };
        world.fill(&mut random);
        world
    }

    /// Writes what may be read: entries of the layer, and q.
    fn fill(&mut self, random: &mut Random) {
        let dim = self.geometry.head_dim;
        for [block, begin, end, ..] in self.entries.clone() {
            for (head, slot) in
                (0..self.geometry.kv_heads).flat_map(|h| (begin..end).map(move |s| (h, s)))
            {
                for start in self.vectors(block, head, slot) {
                    self.cache[start..start + dim].copy_from_slice(&random.values(dim));
                }
            }
        }
        self.q = vec![T::from_f32(f32::NAN); self.positions.len() * self.row_stride];
        for row in 0..self.positions.len() {
            for head in 0..self.heads {
                let start = row * self.row_stride + head * self.head_stride;
                self.q[start..start + dim].copy_from_slice(&random.values(dim));
            }
        }
    }

    /// Where the key and the value of a token start, in the layer read.
    pub fn vectors(&self, block: i32, head: usize, slot: i32) -> [usize; 2] {
        let (block, slot) = (block as usize, slot as usize);
        [
            self.geometry.key_offset(block, self.layer, head, slot),
            self.geometry.value_offset(block, self.layer, head, slot),
        ]
    }

    pub fn queries(&self) -> Queries<'_, T> {
        let vectors = HeadRows {
            values: &self.q,
            rows: self.positions.len(),
            heads: self.heads,
            head_dim: self.geometry.head_dim,
            row_stride: self.row_stride,
            head_stride: self.head_stride,
        };
        Queries { vectors, positions: &self.positions }
    }

    pub fn kv(&self) -> KvView<'_, C> {
        let (geometry, layer, scales) = (self.geometry, self.layer, self.scales);
        let reach = self.reach.as_ref().map(|r| Reach { tables: r.tables, heads: &r.heads });
        KvView { cache: &self.cache, geometry, layer, entries: &self.entries, reach, scales }
    }

    pub fn scoring(&self) -> Scoring<'_> {
        let (scale, window, softcap) = (self.scale, self.window, self.softcap);
        Scoring { scale, rope: &self.rope, window, softcap }
    }

    /// Runs prefill into poisoned outputs.
    pub fn prefill<B: Backend>(&self) -> (Vec<T>, Vec<f32>) {
        let (mut out, mut lse) = self.poisoned();
        B::attend_prefill(AttendPrefill {
            queries: self.queries(),
            kv: self.kv(),
            scoring: self.scoring(),
            row_offsets: &self.row_offsets,
            entry_offsets: &self.entry_offsets,
            out: &mut out,
            lse: &mut lse,
        })
        .expect("valid params");
        (out, lse)
    }

    /// Runs decode; the world must have one row a request.
    pub fn decode<B: Backend>(&self) -> (Vec<T>, Vec<f32>) {
        let (mut out, mut lse) = self.poisoned();
        B::attend_decode(AttendDecode {
            queries: self.queries(),
            kv: self.kv(),
            scoring: self.scoring(),
            entry_offsets: &self.entry_offsets,
            out: &mut out,
            lse: &mut lse,
        })
        .expect("valid params");
        (out, lse)
    }

    /// Runs scoring; the world must have one request.
    pub fn score<B: Backend>(&self) -> Vec<f32> {
        self.score_and_edge::<B>(1, 0).0
    }

    /// Runs scoring with the edge beyond a window and a sink.
    pub fn score_and_edge<B: Backend>(&self, window: u32, sink: u32) -> (Vec<f32>, Vec<f32>) {
        let tables = self.reach.as_ref().map_or(1, |reach| reach.tables);
        let entry_offsets = &self.entry_offsets[..=tables];
        let len = self.entries.iter().map(|e| e[3] + e[2] - e[1]).max().unwrap_or(0);
        let mut mass = vec![POISON; len as usize];
        let (queries, kv, scoring) = (self.queries(), self.kv(), self.scoring());
        let mut share = vec![POISON; self.positions.len() * self.heads];
        let edge = Some(EdgeMass { window, sink, share: &mut share });
        let mass_of = &mut mass;
        B::score_tokens(ScoreTokens { queries, kv, scoring, entry_offsets, mass: mass_of, edge })
            .expect("valid params");
        (mass, share)
    }

    fn poisoned(&self) -> (Vec<T>, Vec<f32>) {
        let states = self.positions.len() * self.heads;
        let out = vec![T::from_f32(POISON); states * self.geometry.head_dim];
        (out, vec![POISON; states])
    }
}

/// What outputs hold before a call: no result comes near it.
pub const POISON: f32 = -12345.0;

fn rope_table(case: &Case, random: &mut Random) -> RopeTable {
    let rotary = [case.head_dim, case.head_dim / 2][random.below(2)];
    let freq = |layer: usize, i: usize| [1e4f32, 1e6][layer].powf(-2.0 * i as f32 / rotary as f32);
    let table = (0..LAYERS).flat_map(|l| (0..rotary / 2).map(move |i| freq(l, i))).collect();
    let pairing = if case.interleaved { Pairing::Interleaved } else { Pairing::Half };
    RopeTable::new(table, LAYERS, pairing).expect("a valid table")
}

/// Entries `[?, begin, end, position, delta]` over `[0, len)`.
fn cut_randomly(len: usize, case: &Case, random: &mut Random) -> Vec<[i32; 5]> {
    let page = case.page_tokens;
    let mut entries = Vec::new();
    let (mut position, mut delta) = (0, case.deltas[0]);
    while position < len {
        let begin = if case.ragged { random.below(page) } else { 0 };
        let room = (page - begin).min(len - position);
        let tokens = if case.ragged { 1 + random.below(room) } else { room };
        if random.below(3) == 0 {
            delta = case.deltas[random.below(case.deltas.len())];
        }
        entries.push([0, begin as i32, (begin + tokens) as i32, position as i32, delta]);
        position += tokens;
    }
    entries
}

/// Asserts equality within one rounding of the type plus `slack`, NaN and infinities exactly.
pub fn assert_close<T: Element>(got: &[T], expected: &[T], slack: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let ulp = match T::NAME {
        "f32" => f32::EPSILON,
        "bf16" => 1.0 / 128.0,
        "fp8_e4m3" => 1.0 / 8.0,
        _ => 1.0 / 1024.0,
    };
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (got, expected) = (got.to_f32(), expected.to_f32());
        let alike = got == expected || (got.is_nan() && expected.is_nan());
        // Below the least number with a full mantissa, numbers lie as far apart as there.
        let size = if T::QUANTISED { expected.abs().max(1.0 / 64.0) } else { expected.abs() };
        let near = (got - expected).abs() <= slack * (1.0 + expected.abs()) + ulp * size;
        assert!(alike || near, "{what}[{i}]: got {got}, expected {expected}");
    }
}
