//! Cosines and sines of the deltas that a call meets, computed once each.

use kvweave_core::ops::{Pairing, RopeTable};

/// Cosines and sines per distinct (frequencies, delta).
///
/// The angle is the f64 product of the whole delta and the f32 frequency, reduced in f64: exact to
/// far below an f32 ulp for any delta.
pub(crate) struct Turns {
    keys: Vec<(usize, i32)>,
    /// [keys, pairs] of (cos, sin).
    table: Vec<(f32, f32)>,
    pairs: usize,
    pairing: Pairing,
}

impl Turns {
    /// For the given (layer, delta) pairs; `delta = 0` needs none and is left out.
    pub(crate) fn new(rope: &RopeTable, needed: impl Iterator<Item = (usize, i32)>) -> Self {
        let mut keys: Vec<(usize, i32)> = Vec::new();
        for (layer, delta) in needed.filter(|&(_, delta)| delta != 0) {
            let key = (rope.first_alike(layer), delta);
            if keys.last() != Some(&key) {
                keys.push(key);
            }
        }
        keys.sort_unstable();
        keys.dedup();
        let angles = keys.iter().flat_map(|&(layer, delta)| {
            rope.inv_freq(layer).iter().map(move |&f| f64::from(delta) * f64::from(f))
        });
        let table = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).collect();
        Self { keys, table, pairs: rope.pairs(), pairing: rope.pairing() }
    }

    /// The turn by `delta` positions with the frequencies of `layer`.
    ///
    /// # Panics
    /// If the pair was not announced to `new`.
    pub(crate) fn get(&self, rope: &RopeTable, layer: usize, delta: i32) -> Turn<'_> {
        let key = (rope.first_alike(layer), delta);
        let index = self.keys.binary_search(&key).expect("every turn is announced");
        let table = &self.table[index * self.pairs..(index + 1) * self.pairs];
        Turn { table, pairing: self.pairing }
    }
}

/// One rotation.
#[derive(Clone, Copy)]
pub(crate) struct Turn<'a> {
    table: &'a [(f32, f32)],
    pairing: Pairing,
}

impl Turn<'_> {
    /// Rotates one vector in place.
    #[inline]
    pub(crate) fn forward(&self, vector: &mut [f32]) {
        let pairs = self.table.len();
        match self.pairing {
            Pairing::Half => {
                let (first, second) = vector[..2 * pairs].split_at_mut(pairs);
                for ((x, y), &(cos, sin)) in first.iter_mut().zip(second).zip(self.table) {
                    (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
                }
            }
            Pairing::Interleaved => {
                let couples = vector[..2 * pairs].as_chunks_mut::<2>().0;
                for ([x, y], &(cos, sin)) in couples.iter_mut().zip(self.table) {
                    (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
                }
            }
        }
    }

    /// Rotates one vector in place the other way round.
    pub(crate) fn undo(&self, vector: &mut [f32]) {
        let pairs = self.table.len();
        for (i, &(cos, sin)) in self.table.iter().enumerate() {
            let (first, second) = self.pairing.elements(i, pairs);
            let (x, y) = (vector[first], vector[second]);
            (vector[first], vector[second]) = (x * cos + y * sin, y * cos - x * sin);
        }
    }

    /// Rotates N interleaved vectors [D][N] the other way round.
    pub(crate) fn backward<const N: usize>(&self, source: &[[f32; N]], target: &mut [[f32; N]]) {
        target.copy_from_slice(source);
        let pairs = self.table.len();
        for (i, &(cos, sin)) in self.table.iter().enumerate() {
            let (first, second) = self.pairing.elements(i, pairs);
            for n in 0..N {
                let (x, y) = (source[first][n], source[second][n]);
                target[first][n] = x * cos + y * sin;
                target[second][n] = y * cos - x * sin;
            }
        }
    }
}
