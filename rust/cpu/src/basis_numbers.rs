//! The numbers of vectors in a basis, a page at a time.

use kvweave_core::ops::{ROW_BITS, VECTOR_BITS, basis_number, fixed_point};

use crate::simd::{Kernel, Vector, dispatch};

/// What `basis_numbers` of the definition multiplies with, and room for the vectors.
#[derive(Default)]
pub(crate) struct BasisNumbers {
    /// [D, C]: the integers of the rows, so that a vector's C products advance together. f64 holds
    /// these and their sums exactly.
    turned: Vec<f64>,
    /// [C]: what an integer of each row stands for.
    powers: Vec<f32>,
    /// [D]: of a row or a vector.
    integers: Vec<i32>,
    /// [C]
    sums: Vec<f64>,
}

impl BasisNumbers {
    /// Of rows [C, D].
    pub(crate) fn of(&mut self, rows: &[f32], dim: usize) {
        let channels = rows.len() / dim;
        self.turned.resize(dim * channels, 0.0);
        self.sums.resize(channels, 0.0);
        self.integers.resize(dim, 0);
        self.powers.clear();
        for (channel, row) in rows.chunks_exact(dim).enumerate() {
            let row = row.iter().copied();
            self.powers.push(fixed_point(row, ROW_BITS, &mut self.integers));
            for (d, &integer) in self.integers.iter().enumerate() {
                self.turned[d * channels + channel] = f64::from(integer);
            }
        }
    }

    /// The numbers [C] of a vector; returns whether x − mean and all of these are finite.
    pub(crate) fn numbers(&mut self, x: &[f32], mean: &[f32], numbers: &mut [f32]) -> bool {
        let centred = x.iter().zip(mean).map(|(x, mean)| x - mean);
        let of_vector = fixed_point(centred, VECTOR_BITS, &mut self.integers);
        let Self { turned, integers, sums, .. } = self;
        dispatch(Sums { turned, integers, sums });
        for ((number, &sum), &of_row) in numbers.iter_mut().zip(&self.sums).zip(&self.powers) {
            *number = basis_number(sum as f32, of_row, of_vector);
        }
        numbers.iter().chain([&of_vector]).all(|x| x.is_finite())
    }
}

/// Sums of the products of one vector with all rows.
struct Sums<'a> {
    turned: &'a [f64],
    integers: &'a [i32],
    sums: &'a mut [f64],
}

impl Kernel for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector, const C: usize>(self) {
        let Self { turned, integers, sums } = self;
        sums.fill(0.0);
        if sums.is_empty() {
            return;
        }
        for (&x, of_rows) in integers.iter().zip(turned.chunks_exact(sums.len())) {
            let x = f64::from(x);
            for (sum, row) in sums.iter_mut().zip(of_rows) {
                *sum += x * row;
            }
        }
    }
}
