//! A register of numbers, and work that is written over any.

/// A register of f32 lanes.
pub(crate) trait Vector: Copy {
    /// Lanes, a divisor of 16.
    const LANES: usize;

    fn splat(x: f32) -> Self;
    /// The first lanes of a slice that has at least that many.
    fn load(source: &[f32]) -> Self;
    /// Into the first lanes of a slice that has at least that many.
    fn store(self, target: &mut [f32]);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self · factor + addend`.
    fn fma(self, factor: Self, addend: Self) -> Self;
    /// `self > other ? self : other`, so `other` where either is NaN.
    fn max_or(self, other: Self) -> Self;
    /// `self < other ? self : other`, so `other` where either is NaN.
    fn min_or(self, other: Self) -> Self;
    /// `self < bound ? then : otherwise`.
    fn if_less(self, bound: Self, then: Self, otherwise: Self) -> Self;
    /// The magnitude of `self` with the sign of `sign`.
    fn copy_sign(self, sign: Self) -> Self;
    /// The low bits of each lane read as an integer n, `2^n`; 0 for n = −127.
    fn power_of_two(self) -> Self;
    fn sum(self) -> f32;
    /// The largest lane; lanes that are NaN are not expected.
    fn max_lane(self) -> f32;
    /// Transposes the top left 8 × 8 of two strided matrices.
    fn transpose_8x8(source: &[f32], source_stride: usize, target: &mut [f32], stride: usize);
}

/// Work written over any vector. `C` is the number of vectors that, with 6 rows, fill the
/// accumulator registers.
pub(crate) trait Kernel {
    type Output;

    /// Must be `inline(always)`, as must all it calls with vectors.
    fn run<V: Vector, const C: usize>(self) -> Self::Output;
}
