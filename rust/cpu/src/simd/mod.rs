//! One vector trait, one implementation per instruction set, one place that chooses.
//!
//! Kernels are written once over [`Vector`] and marked `inline(always)` all the way down, so that
//! each entry point below compiles its own copy for its instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod math;
mod portable;

pub(crate) use math::{exp2, tanh};

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

/// Runs a kernel on the widest instruction set this machine has.
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if avx512::is_available() {
            // SAFETY: avx512f and what it implies were detected on this machine.
            return unsafe { avx512::run(kernel) };
        }
        if avx2::is_available() {
            // SAFETY: avx2 and fma were detected on this machine.
            return unsafe { avx2::run(kernel) };
        }
    }
    kernel.run::<portable::Portable, 2>()
}

/// Runs a kernel on every instruction set this machine has, for tests.
#[cfg(test)]
pub(crate) fn on_every_set<K: Kernel + Clone>(kernel: &K) -> Vec<K::Output> {
    let mut outputs = vec![kernel.clone().run::<portable::Portable, 2>()];
    #[cfg(target_arch = "x86_64")]
    {
        if avx2::is_available() {
            // SAFETY: avx2 and fma were detected on this machine.
            outputs.push(unsafe { avx2::run(kernel.clone()) });
        }
        if avx512::is_available() {
            // SAFETY: avx512f and what it implies were detected on this machine.
            outputs.push(unsafe { avx512::run(kernel.clone()) });
        }
    }
    outputs
}
