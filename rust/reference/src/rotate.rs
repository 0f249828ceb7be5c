//! Rotation of one vector by a whole number of positions.

use kvweave_core::ops::RopeTable;

/// Rotates `vector` in place by `delta` positions with the frequencies of `layer`; elements past
/// `rotary_dim` stay.
pub(crate) fn rotate(vector: &mut [f64], rope: &RopeTable, layer: usize, delta: i64) {
    for (i, &frequency) in rope.inv_freq(layer).iter().enumerate() {
        let (sin, cos) = (delta as f64 * f64::from(frequency)).sin_cos();
        let (first, second) = rope.pairing().elements(i, rope.pairs());
        let (x, y) = (vector[first], vector[second]);
        vector[first] = x * cos - y * sin;
        vector[second] = x * sin + y * cos;
    }
}
