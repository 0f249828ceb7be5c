//! Lanes as an array: the fallback everywhere, left to the compiler to vectorise.

use super::Vector;

#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 4]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Vector for Portable {
    const LANES: usize = 4;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; 4])
    }

    #[inline(always)]
    fn load(source: &[f32]) -> Self {
        Self(std::array::from_fn(|i| source[i]))
    }

    #[inline(always)]
    fn store(self, target: &mut [f32]) {
        target[..4].copy_from_slice(&self.0);
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    /// Two roundings: a fused one is a library call where the instruction is missing.
    #[inline(always)]
    fn fma(self, factor: Self, addend: Self) -> Self {
        self.mul(factor).add(addend)
    }

    #[inline(always)]
    fn max_or(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min_or(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn if_less(self, bound: Self, then: Self, otherwise: Self) -> Self {
        Self(std::array::from_fn(
            |i| {
                if self.0[i] < bound.0[i] { then.0[i] } else { otherwise.0[i] }
            },
        ))
    }

    #[inline(always)]
    fn copy_sign(self, sign: Self) -> Self {
        self.zip(sign, f32::copysign)
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        Self(self.0.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23))))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d] = self.0;
        (a + b) + (c + d)
    }

    #[inline(always)]
    fn max_lane(self) -> f32 {
        let [a, b, c, d] = self.0;
        a.max(b).max(c.max(d))
    }

    #[inline(always)]
    fn transpose_8x8(source: &[f32], source_stride: usize, target: &mut [f32], stride: usize) {
        for i in 0..8 {
            for j in 0..8 {
                target[j * stride + i] = source[i * source_stride + j];
            }
        }
    }
}
