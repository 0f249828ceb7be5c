//! Attention of one row per request over top-r pages: the basis meets the query and the output,
//! never a key or a value (`MosaicKV`, section 5.3).

use kvweave_core::ops::{
    AttendPacked, Basis, Element, Entry, KvView, PackedKv, Scoring, Side, TopRPage, Visible,
};
use rayon::prelude::*;

use crate::top_r_page::{add, kept_of};
use crate::turn::Turns;

/// A task is a row and a KV head: its query heads read each packed vector once. `params` were
/// accepted, and their pages are those of `of`.
pub(crate) fn attend_top_r<T: Element>(params: AttendPacked<'_, T>, of: TopRPage) {
    let AttendPacked { queries, kv, scoring, entry_offsets, out, lse } = params;
    let pages = kv.as_pages();
    let turns = Turns::new(scoring.rope, pages.entries.iter().map(|row| (kv.layer, row[4])));
    let (kv_heads, dim) = (kv.kv_heads, kv.format.head_dim());
    let group = queries.vectors.heads / kv_heads;
    let call = Call { kv, pages, scoring, turns, of };
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
    pages: KvView<'a, ()>,
    scoring: Scoring<'a>,
    turns: Turns,
    of: TopRPage,
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
    kept: Vec<(u32, f32)>,
    /// [heads, tokens] of one entry.
    scores: Vec<f32>,
}

impl<'a, 'b> Heads<'a, 'b> {
    fn new(call: &'a Call<'a>, rank: usize, q: &'b [Vec<f32>]) -> Self {
        let head = |q: &Vec<f32>| Head {
            query: vec![0.0; call.of.of().channels],
            offset: 0.0,
            top: f32::NEG_INFINITY,
            mass: 0.0,
            here_mass: 0.0,
            here: vec![0.0; call.of.of().channels],
            out: vec![0.0; q.len()],
        };
        let heads = q.iter().map(head).collect();
        let (kept, scores) = (Vec::new(), Vec::new());
        Self { call, rank, q, heads, current: None, kept, scores }
    }

    fn basis(&self, block: usize, side: Side) -> Basis<'a> {
        let bases = self.call.kv.bases.expect("top-r pages have bases, as `validate` proved");
        bases.basis(&self.call.kv.format, block, self.rank, side)
    }

    fn attend(&mut self, entry: Entry, seen: Visible) {
        let position = |slot: usize| entry.position + (slot - entry.begin) as i64;
        let slots: Vec<usize> =
            (entry.begin..entry.end).filter(|&slot| seen.contains(position(slot))).collect();
        if slots.is_empty() {
            return;
        }
        self.enter(&entry);
        let page = self.call.kv.page(entry.block, self.rank);
        let (of, Scoring { scale, softcap, .. }) = (&self.call.of, self.call.scoring);
        self.scores.resize(slots.len() * self.heads.len(), 0.0);
        for (i, &slot) in slots.iter().enumerate() {
            kept_of(of, (Side::Keys, slot), page, &mut self.kept);
            for (head, scores) in self.heads.iter().zip(self.scores.chunks_mut(slots.len())) {
                let product = |&(channel, c): &(u32, f32)| head.query[channel as usize] * c;
                let dot = self.kept.iter().map(product).sum::<f32>() + head.offset;
                let score = scale * dot;
                scores[i] = softcap.map_or(score, |cap| cap * (score / cap).tanh());
            }
        }
        for (head, scores) in self.heads.iter_mut().zip(self.scores.chunks_mut(slots.len())) {
            head.weigh(&mut scores[..slots.len()]);
        }
        for (i, &slot) in slots.iter().enumerate() {
            kept_of(of, (Side::Values, slot), page, &mut self.kept);
            for (head, scores) in self.heads.iter_mut().zip(self.scores.chunks(slots.len())) {
                for &(channel, c) in &self.kept {
                    head.here[channel as usize] += scores[i] * c;
                }
            }
        }
    }

    /// Makes the entry's basis and delta the current ones.
    fn enter(&mut self, entry: &Entry) {
        let number = self.call.kv.bases.map_or(0, |bases| bases.of[entry.block]);
        let before = self.current.replace((entry.block, number, entry.delta));
        match before {
            Some((_, same, delta)) if (same, delta) == (number, entry.delta) => return,
            Some((block, other, _)) if other != number => self.leave(block),
            _ => {}
        }
        let keys = self.basis(entry.block, Side::Keys);
        let (rope, layer) = (self.call.scoring.rope, self.call.kv.layer);
        for (head, q) in self.heads.iter_mut().zip(self.q) {
            let mut q = q.clone();
            if entry.delta != 0 {
                self.call.turns.get(rope, layer, entry.delta).undo(&mut q);
            }
            let directions = keys.directions.chunks_exact(q.len());
            for (target, direction) in head.query.iter_mut().zip(directions) {
                *target = dot(&q, direction);
            }
            head.offset = dot(&q, keys.mean);
        }
    }

    /// Takes what was read in the basis of a block back into channels.
    fn leave(&mut self, block: usize) {
        let values = self.basis(block, Side::Values);
        for head in &mut self.heads {
            let directions = values.directions.chunks_exact(values.mean.len());
            for (c, direction) in head.here.iter_mut().zip(directions) {
                add(&mut head.out, *c, direction);
                *c = 0.0;
            }
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

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
