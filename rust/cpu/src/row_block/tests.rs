//! The kernels on every instruction set of this machine against scalar f64 loops.

use kvweave_core::ops::Visible;

use super::{Absorb, AddMass, Edge, ROWS, Rows, State};
use crate::piece::{KEYS, Piece};
use crate::simd::{Kernel, Vector, on_every_set};
use crate::tile::{COLUMNS, Tile};

const BLOCKS: usize = 3;
const PIECES: usize = 2;

/// Three blocks over two pieces, D 40: one full value strip and a ragged rest.
#[derive(Clone)]
struct Scene {
    q: Vec<[f32; ROWS]>,
    keys: Vec<Vec<[f32; KEYS]>>,
    values: Vec<Vec<f32>>,
    visible: Vec<Visible>,
    edge: Vec<(i64, i64)>,
    cap: Option<f32>,
}

const D: usize = 40;

fn wave(seed: usize) -> f32 {
    ((seed as f64 * 12.9898).sin() * 43_758.545).fract() as f32
}

fn scene(cap: Option<f32>) -> Scene {
    let q = (0..BLOCKS * D).map(|i| std::array::from_fn(|r| wave(i * ROWS + r)));
    let keys = |p: usize| (0..D).map(move |d| std::array::from_fn(|k| wave(d * 99 + k + p * 7)));
    let width = D.next_multiple_of(COLUMNS);
    let value = |p: usize, i: usize| if i % width < D { wave(i * 3 + p) } else { 0.0 };
    let values = |p: usize| (0..KEYS * width).map(move |i| value(p, i));
    // The last block is half empty.
    let visible = |row: usize| match row % 5 {
        _ if row >= 2 * ROWS + 3 => (0, 0),
        0 => (0, 1),
        1 => (0, 128),
        2 => (30, 60 + row as i64),
        3 => (70, 100),
        _ => (0, 0),
    };
    let seen = |(first, end)| Visible { sink: 0, first, end };
    let edge = |row: usize| [(0, 0), (20, 66), (64, 128), (0, 128)][row % 4];
    Scene {
        q: q.collect(),
        keys: (0..PIECES).map(|p| keys(p).collect()).collect(),
        values: (0..PIECES).map(|p| values(p).collect()).collect(),
        visible: (0..BLOCKS * ROWS).map(visible).map(seen).collect(),
        edge: (0..BLOCKS * ROWS).map(edge).collect(),
        cap,
    }
}

fn piece(p: usize) -> Piece {
    let tokens = [KEYS, 50][p];
    Piece { position: (p * KEYS) as i64, tokens, entry: 0, skip: 0, delta: 0 }
}

impl Scene {
    fn tile(&self, p: usize) -> Tile {
        let mut tile = Tile::new(D);
        tile.keys_mut().copy_from_slice(&self.keys[p]);
        tile.values.copy_from_slice(&self.values[p]);
        tile
    }

    fn rows(&self) -> Rows<'_> {
        Rows { q: &self.q, visible: &self.visible, cap: self.cap }
    }

    fn score(&self, row: usize, p: usize, key: usize) -> f64 {
        let q = &self.q[row / ROWS * D..][..D];
        let dot =
            |(q, k): (&[f32; ROWS], &[f32; KEYS])| f64::from(q[row % ROWS]) * f64::from(k[key]);
        let dot: f64 = q.iter().zip(&self.keys[p]).map(dot).sum();
        self.cap.map_or(dot, |cap| f64::from(cap) * dot.tanh())
    }

    /// (piece, key, 2^score) of what a row sees.
    fn seen(&self, row: usize) -> Vec<(usize, usize, f64)> {
        let Visible { first, end, .. } = self.visible[row];
        (first..end.min(KEYS as i64 + 50))
            .map(|at| (at as usize / KEYS, at as usize % KEYS))
            .map(|(p, key)| (p, key, self.score(row, p, key).exp2()))
            .collect()
    }
}

/// Absorbs both pieces, then spreads the mass over their keys.
impl Kernel for Scene {
    type Output = (Vec<State>, Vec<f32>, [[f32; KEYS]; PIECES], Vec<[f32; ROWS]>);

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) -> Self::Output {
        let width = D.next_multiple_of(COLUMNS);
        let mut states = vec![State::EMPTY; BLOCKS];
        let mut out = vec![0.0; BLOCKS * ROWS * width];
        let mut edges = vec![[0.0; ROWS]; BLOCKS];
        for p in 0..PIECES {
            let (rows, tile, piece) = (self.rows(), &self.tile(p), &piece(p));
            let edge = Some(Edge { positions: &self.edge, mass: &mut edges });
            Absorb { rows, tile, piece, states: &mut states, out: &mut out, edge }.run::<V, C>();
        }
        let log2_sum = |row: usize| states[row / ROWS].log2_sum(row % ROWS);
        let log2_sums: Vec<f32> = (0..BLOCKS * ROWS).map(log2_sum).collect();
        let mut masses = [[0.0; KEYS]; PIECES];
        for (p, mass) in masses.iter_mut().enumerate() {
            let (rows, tile, piece) = (self.rows(), &self.tile(p), &piece(p));
            AddMass { rows, tile, piece, log2_sums: &log2_sums, mass }.run::<V, C>();
        }
        (states, out, masses, edges)
    }
}

fn check(scene: &Scene) {
    let width = D.next_multiple_of(COLUMNS);
    for (states, out, masses, edges) in on_every_set(scene) {
        let mut expected_masses = [[0.0f64; KEYS]; PIECES];
        for row in 0..BLOCKS * ROWS {
            let seen = scene.seen(row);
            let total: f64 = seen.iter().map(|&(_, _, weight)| weight).sum();
            let mass = states[row / ROWS].mass[row % ROWS];
            let lse = f64::from(states[row / ROWS].log2_sum(row % ROWS));
            assert!(seen.is_empty() == (mass == 0.0), "row {row}");
            assert!(seen.is_empty() || (lse - total.log2()).abs() < 1e-5, "row {row}");
            for d in 0..D {
                let value = |p: usize, k: usize| scene.values[p][k * width + d];
                let sum: f64 = seen.iter().map(|&(p, k, w)| w * f64::from(value(p, k))).sum();
                let got = f64::from(out[row * width + d]) / f64::from(mass.max(1e-30));
                assert!((got - sum / total.max(1e-30)).abs() < 1e-5, "row {row} column {d}");
            }
            let (first, end) = scene.edge[row];
            let edge = |&&(p, k, _): &&(usize, usize, f64)| {
                (first..end).contains(&((p * KEYS + k) as i64))
            };
            let far: f64 = seen.iter().filter(edge).map(|&(_, _, weight)| weight).sum();
            let got = f64::from(edges[row / ROWS][row % ROWS]) / f64::from(mass.max(1e-30));
            assert!((got - far / total.max(1e-30)).abs() < 1e-5, "row {row}");
            for (p, k, weight) in seen {
                expected_masses[p][k] += weight / total;
            }
        }
        for (mass, expected) in masses.iter().flatten().zip(expected_masses.iter().flatten()) {
            assert!((f64::from(*mass) - expected).abs() < 1e-5);
        }
    }
}

#[test]
fn attention_on_every_instruction_set() {
    check(&scene(None));
    check(&scene(Some(3.0)));
}

#[derive(Clone)]
struct TransposeEight(Vec<f32>);

impl Kernel for TransposeEight {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) -> Vec<f32> {
        let mut target = vec![0.0; 8 * 11];
        V::transpose_8x8(&self.0, 9, &mut target, 11);
        target
    }
}

#[test]
fn transposes_on_every_instruction_set() {
    let source: Vec<f32> = (0..72).map(|x| x as f32).collect();
    for target in on_every_set(&TransposeEight(source.clone())) {
        for (i, j) in (0..64).map(|n| (n / 8, n % 8)) {
            assert_eq!(target[j * 11 + i], source[i * 9 + j]);
        }
    }
}
