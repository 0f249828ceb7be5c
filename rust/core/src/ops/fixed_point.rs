//! Numbers of vectors in a basis: sums of products of integers, which are exact.
//!
//! Packing chooses by these numbers, and every version has to write the same bytes. So both factors
//! of a product are rounded to integers of a power of two each, and any order of summing their
//! products gives the same bits: that of a tensor core too, which takes integers byte by byte.

/// What the integers of a vector have below the sign: they hold numbers of bf16 and f16 exactly,
/// but for those far below the vector's largest.
pub const VECTOR_BITS: u32 = 23;
/// Those of the rows of a basis, whose numbers are of one size.
pub const ROW_BITS: u32 = 15;
/// Beside so large a number nothing is left of a fraction but its rounding, and the lowest bits are
/// an integer's.
const WHOLE: f64 = 6_755_399_441_055_744.0;
/// 2 to this, at least, is what a vector's largest number is taken for.
const LEAST_EXPONENT: i32 = -104;

/// Rounds numbers x to integers n of so many bits, the largest to all of them; returns p of
/// x ≈ n·p, a power of two, and NaN where a number is not finite. Halves go to the even integer.
#[must_use]
pub fn fixed_point(numbers: impl Iterator<Item = f32> + Clone, bits: u32, into: &mut [i32]) -> f32 {
    let magnitude = |x: f32| x.to_bits() & !(1 << 31);
    let largest = numbers.clone().fold(0, |largest, x| magnitude(x).max(largest));
    if largest >= f32::INFINITY.to_bits() {
        return f32::NAN;
    }
    let exponent = ((largest >> 23) as i32 - 127).max(LEAST_EXPONENT) - (bits as i32 - 1);
    let power = |exponent: i32| f32::from_bits(((127 + exponent) as u32) << 23);
    let most = (1 << bits) - 1;
    for (n, x) in into.iter_mut().zip(numbers) {
        let integer = (f64::from(x * power(-exponent)) + WHOLE).to_bits() as u32;
        *n = integer.cast_signed().min(most);
    }
    power(exponent)
}

/// The number that a sum of products stands for, by the powers of both factors: rounded once, but
/// where it is out of the range of normal numbers.
#[must_use]
pub fn basis_number(sum: f32, of_row: f32, of_vector: f32) -> f32 {
    sum * of_row * of_vector
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded<const N: usize>(numbers: [f32; N]) -> (f32, [i32; N]) {
        let mut into = [0; N];
        (fixed_point(numbers.into_iter(), ROW_BITS, &mut into), into)
    }

    #[test]
    fn the_largest_has_all_bits() {
        let step = 2f32.powi(-14);
        assert_eq!(rounded([1.0, -0.5, 0.0]), (step, [1 << 14, -(1 << 13), 0]));
        assert_eq!(rounded([0.75, 1.5]), (step, [12288, 24576]));
        assert_eq!(rounded([3e38, -3e38]).0, 2f32.powi(113));
        let mut into = [0; 2];
        let step = fixed_point([1.5, -0.1].into_iter(), VECTOR_BITS, &mut into);
        assert_eq!((step, into), (2f32.powi(-22), [3 << 21, -419_430]));
    }

    #[test]
    fn what_would_be_one_more_is_the_largest() {
        let below_two = f32::from_bits(2f32.to_bits() - 1);
        assert_eq!(rounded([below_two, -below_two]), (2f32.powi(-14), [32767, -32768]));
    }

    #[test]
    fn numbers_as_small_as_can_be_are_none() {
        let (step, integers) = rounded([1e-45, -1e-36]);
        assert_eq!((step, integers), (2f32.powi(-118), [0, 0]));
        assert_eq!(rounded([0.0, -0.0]), (step, [0, 0]));
    }

    #[test]
    fn what_is_not_finite_has_no_integers() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            let (step, _) = rounded([1.0, odd]);
            assert!(basis_number(1.0, step, 1.0).is_nan());
            assert!(basis_number(1.0, 1.0, step).is_nan());
        }
    }
}
