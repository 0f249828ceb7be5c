//! Attention of one row per request over top-r pages or planes: the basis meets the query and the
//! output, never a key or a value (`MosaicKV`, section 5.3).

use kvweave_core::ops::{
    AttendPacked, Bases, Element, Entry, KvView, PackedKv, PlanesSide, Scoring, Side, TopRPage,
    Visible,
};
use rayon::prelude::*;

use crate::planes_page::{is_nan, steps_of};
use crate::simd::{Kernel, Vector, dispatch};
use crate::top_r_page::{add, spread};
use crate::turn::Turns;

/// A task is a row and a KV head: its query heads read each packed vector once. `params` were
/// accepted, and their pages are packed in `bases`.
pub(crate) fn attend_in_basis<T: Element>(params: AttendPacked<'_, T>, bases: Bases<'_>) {
    let AttendPacked { queries, kv, scoring, entry_offsets, out, lse } = params;
    let pages = kv.as_pages();
    let turns = Turns::new(scoring.rope, pages.entries.iter().map(|row| (kv.layer, row[4])));
    let (kv_heads, dim) = (kv.kv_heads, kv.format.head_dim());
    let group = queries.vectors.heads / kv_heads;
    let call = Call { kv, bases, pages, scoring, turns };
    out.par_chunks_exact_mut(group * dim)
        .zip(lse.par_chunks_exact_mut(group))
        .enumerate()
        .for_each(|(task, (out, lse))| {
            let (row, kv_head) = (task / kv_heads, task % kv_heads);
            let head = call.pages.head(kv_head, &scoring);
            let first = kv_head * group;
            let q: Vec<Vec<f32>> = (first..first + group)
                .map(|head| queries.vectors.vector(row, head).iter().map(|x| x.to_f32()).collect())
                .collect();
            let mut heads = Heads::new(&call, head.rank, &q);
            let seen = head.visible(queries.positions[row]);
            for &entry in &call.pages.entries[call.pages.span(entry_offsets, row, head.table)] {
                heads.attend(Entry::new(entry), seen);
            }
            heads.finish(out, lse);
        });
}

struct Call<'a> {
    kv: PackedKv<'a>,
    bases: Bases<'a>,
    pages: KvView<'a, ()>,
    scoring: Scoring<'a>,
    turns: Turns,
}

/// One side of a basis, as attention takes it.
struct Directions<'a> {
    mean: &'a [f32],
    /// [C, D]: what a number along each channel that has one stands for.
    rows: &'a [f32],
    numbers: Numbers,
}

/// How the numbers of a vector lie in its page.
enum Numbers {
    TopR(TopRPage, Side),
    Planes(PlanesSide),
}

impl Directions<'_> {
    fn channels(&self) -> usize {
        self.rows.len() / self.mean.len()
    }

    /// The numbers of tokens of a page, into `rows` [tokens, C]; `kept` is room.
    fn read(&self, slots: &[usize], page: &[u8], kept: &mut Vec<f32>, rows: &mut Vec<f32>) {
        let channels = self.channels();
        rows.clear();
        rows.resize(slots.len() * channels, 0.0);
        match &self.numbers {
            Numbers::Planes(place) => steps_of(place, slots.iter().copied(), page, rows),
            Numbers::TopR(of, side) => {
                for (&slot, row) in slots.iter().zip(rows.chunks_exact_mut(channels)) {
                    spread(of, (*side, slot), page, kept, row);
                }
            }
        }
    }

    /// Whether a flag says that a token's vector is NaN, which may have no numbers at all.
    fn is_nan(&self, slot: usize, page: &[u8]) -> bool {
        match &self.numbers {
            Numbers::Planes(place) => is_nan(place, slot, page),
            Numbers::TopR(..) => false,
        }
    }
}

/// A query head: its softmax so far. Values that were read in the current basis are still in it.
struct Head {
    /// The query turned back by the delta of entries, in the basis of keys, [C].
    query: Vec<f32>,
    /// The same times the keys' mean: what every score has in common.
    offset: f32,
    top: f32,
    mass: f32,
    /// Of what was read in the current basis: Σ weight, and Σ weight · c, [C].
    here_mass: f32,
    here: Vec<f32>,
    /// Of all bases before, [D].
    out: Vec<f32>,
}

/// The query heads of one KV head of a row.
struct Heads<'a, 'b> {
    call: &'a Call<'a>,
    rank: usize,
    q: &'b [Vec<f32>],
    heads: Vec<Head>,
    /// A block of the current basis, its number, and the delta of the queries.
    current: Option<(usize, i32, i32)>,
    /// [tokens, C] of one entry.
    numbers: Vec<f32>,
    kept: Vec<f32>,
    /// [heads, tokens] of one entry.
    scores: Vec<f32>,
}

impl<'a, 'b> Heads<'a, 'b> {
    fn new(call: &'a Call<'a>, rank: usize, q: &'b [Vec<f32>]) -> Self {
        let head = |q: &Vec<f32>| Head {
            query: vec![0.0; q.len()],
            offset: 0.0,
            top: f32::NEG_INFINITY,
            mass: 0.0,
            here_mass: 0.0,
            here: vec![0.0; q.len()],
            out: vec![0.0; q.len()],
        };
        let heads = q.iter().map(head).collect();
        let [numbers, kept, scores] = [const { Vec::new() }; 3];
        Self { call, rank, q, heads, current: None, numbers, kept, scores }
    }

    fn directions(&self, block: usize, side: Side) -> Directions<'a> {
        let (bases, format) = (&self.call.bases, &self.call.kv.format);
        if let Some(of) = format.top_r() {
            let basis = bases.basis(format, block, self.rank, side);
            let numbers = Numbers::TopR(of, side);
            return Directions { mean: basis.mean, rows: basis.directions, numbers };
        }
        let basis = bases.planes(format, block, self.rank, side);
        let rows = &basis.steps[..basis.place.widths().channels() * basis.mean.len()];
        Directions { mean: basis.mean, rows, numbers: Numbers::Planes(basis.place) }
    }

    fn attend(&mut self, entry: Entry, seen: Visible) {
        let position = |slot: usize| entry.position + (slot - entry.begin) as i64;
        let slots: Vec<usize> =
            (entry.begin..entry.end).filter(|&slot| seen.contains(position(slot))).collect();
        if slots.is_empty() {
            return;
        }
        let keys = self.directions(entry.block, Side::Keys);
        self.enter(&entry, &keys);
        let page = self.call.kv.page(entry.block, self.rank);
        let Scoring { scale, softcap, .. } = self.call.scoring;
        keys.read(&slots, page, &mut self.kept, &mut self.numbers);
        self.scores.resize(slots.len() * self.heads.len(), 0.0);
        for (head, scores) in self.heads.iter_mut().zip(self.scores.chunks_mut(slots.len())) {
            let query = &head.query[..keys.channels()];
            dispatch(Products { query, rows: &self.numbers, out: &mut *scores });
            for (score, &slot) in scores.iter_mut().zip(&slots) {
                let scaled = scale * (*score + head.offset);
                *score = softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
                if keys.is_nan(slot, page) {
                    *score = f32::NAN;
                }
            }
            head.weigh(scores);
        }
        let values = self.directions(entry.block, Side::Values);
        values.read(&slots, page, &mut self.kept, &mut self.numbers);
        let odd = slots.iter().any(|&slot| values.is_nan(slot, page));
        for (head, weights) in self.heads.iter_mut().zip(self.scores.chunks(slots.len())) {
            let sums = &mut head.here[..values.channels()];
            dispatch(WeightedSum { weights, rows: &self.numbers, sums });
            if odd {
                head.out.fill(f32::NAN);
            }
        }
    }

    /// Makes the entry's basis and delta the current ones.
    fn enter(&mut self, entry: &Entry, keys: &Directions<'_>) {
        let number = self.call.bases.of[entry.block];
        let before = self.current.replace((entry.block, number, entry.delta));
        match before {
            Some((_, same, delta)) if (same, delta) == (number, entry.delta) => return,
            Some((block, other, _)) if other != number => self.leave(block),
            _ => {}
        }
        let (rope, layer) = (self.call.scoring.rope, self.call.kv.layer);
        for (head, q) in self.heads.iter_mut().zip(self.q) {
            let mut q = q.clone();
            if entry.delta != 0 {
                self.call.turns.get(rope, layer, entry.delta).undo(&mut q);
            }
            let query = &mut head.query[..keys.channels()];
            dispatch(Products { query: &q, rows: keys.rows, out: query });
            head.offset = dot(&q, keys.mean);
        }
    }

    /// Takes what was read in the basis of a block back into channels.
    fn leave(&mut self, block: usize) {
        let values = self.directions(block, Side::Values);
        for head in &mut self.heads {
            let here = &mut head.here[..values.channels()];
            dispatch(WeightedSum { weights: here, rows: values.rows, sums: &mut head.out });
            here.fill(0.0);
            add(&mut head.out, head.here_mass, values.mean);
            head.here_mass = 0.0;
        }
    }

    fn finish<T: Element>(mut self, out: &mut [T], lse: &mut [f32]) {
        if let Some((block, ..)) = self.current {
            self.leave(block);
        }
        let dim = out.len() / lse.len();
        for ((head, out), lse) in self.heads.iter().zip(out.chunks_exact_mut(dim)).zip(lse) {
            let nothing = head.mass == 0.0;
            *lse = if nothing { f32::NEG_INFINITY } else { head.top + head.mass.ln() };
            for (out, sum) in out.iter_mut().zip(&head.out) {
                *out = T::from_f32(if nothing { 0.0 } else { sum / head.mass });
            }
        }
    }
}

impl Head {
    /// Scores into weights relative to the top, which may rise; NaN makes all NaN.
    fn weigh(&mut self, scores: &mut [f32]) {
        let top = scores.iter().copied().fold(self.top, f32::max);
        let base = if top == f32::NEG_INFINITY { 0.0 } else { top };
        if top > self.top {
            let factor = (self.top - base).exp();
            self.mass *= factor;
            self.here_mass *= factor;
            self.here.iter_mut().chain(&mut self.out).for_each(|sum| *sum *= factor);
            self.top = top;
        }
        let mut mass = 0.0;
        for score in scores {
            *score = (*score - base).exp();
            mass += *score;
        }
        self.mass += mass;
        self.here_mass += mass;
    }
}

/// The product of a query [C] with each row [C].
struct Products<'a> {
    query: &'a [f32],
    rows: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { query, rows, out } = self;
        if query.is_empty() {
            out.fill(0.0);
            return;
        }
        for (out, row) in out.iter_mut().zip(rows.chunks_exact(query.len())) {
            *out = dot(query, row);
        }
    }
}

/// `sums += Σ weight · row` over rows [C].
struct WeightedSum<'a> {
    weights: &'a [f32],
    rows: &'a [f32],
    sums: &'a mut [f32],
}

impl Kernel for WeightedSum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { weights, rows, sums } = self;
        if sums.is_empty() {
            return;
        }
        for (&weight, row) in weights.iter().zip(rows.chunks_exact(sums.len())) {
            add(sums, weight, row);
        }
    }
}

/// Products are summed in lanes, so that they advance together.
const LANES: usize = 16;

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
