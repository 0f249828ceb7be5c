//! The numbers of a vector in a basis.

use kvweave_core::ops::{ROW_BITS, VECTOR_BITS, basis_number, fixed_point};

/// Products of x − mean with each of the rows [C, D], both rounded to integers
/// ([`fixed_point`]); and whether x − mean and all of these are finite.
pub(crate) fn basis_numbers(rows: &[f32], x: &[f32], mean: &[f32]) -> (Vec<f32>, bool) {
    let fixed = |numbers: Vec<f32>, bits: u32| {
        let mut integers = vec![0; numbers.len()];
        let power = fixed_point(numbers.into_iter(), bits, &mut integers);
        (integers, power)
    };
    let centred = x.iter().zip(mean).map(|(x, mean)| x - mean).collect();
    let (vector, of_vector) = fixed(centred, VECTOR_BITS);
    let number = |row: &[f32]| {
        let (row, of_row) = fixed(row.to_vec(), ROW_BITS);
        let sum: i64 = row.iter().zip(&vector).map(|(&d, &x)| i64::from(d) * i64::from(x)).sum();
        basis_number(sum as f32, of_row, of_vector)
    };
    let numbers: Vec<f32> = rows.chunks_exact(x.len()).map(number).collect();
    let finite = numbers.iter().chain([&of_vector]).all(|x| x.is_finite());
    (numbers, finite)
}
