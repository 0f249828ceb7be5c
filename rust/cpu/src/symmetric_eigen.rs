//! Eigenvectors of a symmetric matrix: the one place that asks another crate for them.

use std::fmt;

use faer::{MatRef, Side};

/// Eigenvalues or eigenvectors that did not come out as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoEigenvectors;

impl fmt::Display for NoEigenvectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a matrix whose eigenvectors do not converge")
    }
}

impl std::error::Error for NoEigenvectors {}

/// Eigenvalues [n], the largest first, and orthonormal eigenvectors as the rows of [n, n].
pub(crate) struct Eigen {
    pub(crate) values: Vec<f64>,
    pub(crate) rows: Vec<f64>,
}

/// Eigenvalues and eigenvectors of `matrix` [n, n], of which only the lower triangle is read.
///
/// # Errors
/// `NoEigenvectors` where a number is NaN or infinite, or the iteration does not converge.
///
/// # Panics
/// If the matrix has not n · n numbers.
pub(crate) fn symmetric_eigen(matrix: &[f64], n: usize) -> Result<Eigen, NoEigenvectors> {
    let largest = matrix.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    if !matrix.iter().all(|x| x.is_finite()) {
        return Err(NoEigenvectors);
    }
    // Scaled, as squares of the numbers may be beyond what f64 holds.
    let factor = if largest > 0.0 { largest } else { 1.0 };
    let scaled: Vec<f64> = matrix.iter().map(|x| x / factor).collect();
    // Of the transpose, since rows lie one after the other.
    let columns = MatRef::from_column_major_slice(&scaled, n, n);
    let found = columns.self_adjoint_eigen(Side::Upper).map_err(|_| NoEigenvectors)?;
    let (vectors, diagonal) = (found.U(), found.S().column_vector());
    let values: Vec<f64> = (0..n).rev().map(|i| factor * diagonal[i]).collect();
    let rows = (0..n).rev().flat_map(|i| (0..n).map(move |j| vectors[(j, i)]));
    let rows: Vec<f64> = rows.collect();
    let finite = rows.iter().chain(&values).all(|x| x.is_finite());
    if finite { Ok(Eigen { values, rows }) } else { Err(NoEigenvectors) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turned_diagonal_is_found() {
        // 3 along (1, 1) / √2, 1 along (1, −1) / √2; the upper triangle is not looked at.
        let Eigen { values, rows } =
            symmetric_eigen(&[2.0, 99.0, 1.0, 2.0], 2).expect("eigenvectors");
        assert!((values[0] - 3.0).abs() < 1e-14 && (values[1] - 1.0).abs() < 1e-14);
        let half = 0.5f64.sqrt();
        assert!((rows[0].abs() - half).abs() < 1e-15 && (rows[0] - rows[1]).abs() < 1e-15);
        assert!((rows[2].abs() - half).abs() < 1e-15 && (rows[2] + rows[3]).abs() < 1e-15);
    }

    #[test]
    fn nothing_tiny_and_huge_have_orthonormal_ones() {
        for size in [0.0, 1e-300, 1.0, 1e300] {
            let n = 24;
            let matrix: Vec<f64> = (0..n * n)
                .map(|at| size * if at / n == at % n { 1.0 + (at % 3) as f64 } else { 0.25 })
                .collect();
            let rows = symmetric_eigen(&matrix, n).expect("eigenvectors").rows;
            for (i, a) in rows.chunks_exact(n).enumerate() {
                for (j, b) in rows.chunks_exact(n).enumerate() {
                    let dot: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-12);
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_is_an_error() {
        for x in [f64::NAN, f64::INFINITY] {
            assert!(symmetric_eigen(&[1.0, 0.0, x, 1.0], 2).is_err());
        }
    }
}
