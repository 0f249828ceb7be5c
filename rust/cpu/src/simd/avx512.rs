//! Sixteen lanes: AVX-512 foundation.

use std::arch::x86_64::*;

use super::{Kernel, Vector};

pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f") && super::avx2::is_available()
}

/// Runs a kernel compiled for this instruction set.
///
/// # Safety
/// - [`is_available`] must have returned true on this machine.
#[target_feature(enable = "avx512f,avx2,fma")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512, 4>()
}

/// Values exist only below [`run`]: the methods rely on it.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

macro_rules! lanewise {
    ($($name:ident = $intrinsic:ident;)*) => {$(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: below `run`, so avx512f is there.
            Self(unsafe { $intrinsic(self.0, other.0) })
        }
    )*};
}

impl Vector for Avx512 {
    const LANES: usize = 16;

    lanewise! {
        add = _mm512_add_ps;
        sub = _mm512_sub_ps;
        mul = _mm512_mul_ps;
        div = _mm512_div_ps;
        max_or = _mm512_max_ps;
        min_or = _mm512_min_ps;
    }

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: below `run`, so avx512f is there.
        Self(unsafe { _mm512_set1_ps(x) })
    }

    #[inline(always)]
    fn load(source: &[f32]) -> Self {
        let source = &source[..16];
        // SAFETY: below `run`, so avx512f is there; 16 elements are readable, unaligned is allowed.
        Self(unsafe { _mm512_loadu_ps(source.as_ptr()) })
    }

    #[inline(always)]
    fn store(self, target: &mut [f32]) {
        let target = &mut target[..16];
        // SAFETY: below `run`, so avx512f is there; 16 elements are writable, unaligned is allowed.
        unsafe { _mm512_storeu_ps(target.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn fma(self, factor: Self, addend: Self) -> Self {
        // SAFETY: below `run`, so avx512f is there.
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn if_less(self, bound: Self, then: Self, otherwise: Self) -> Self {
        // SAFETY: below `run`, so avx512f is there.
        Self(unsafe {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            _mm512_mask_blend_ps(less, otherwise.0, then.0)
        })
    }

    #[inline(always)]
    fn copy_sign(self, sign: Self) -> Self {
        // SAFETY: below `run`, so avx512f is there. 0xCA takes the second operand's bit where the
        // first has one, else the third's.
        Self(unsafe {
            let magnitude = _mm512_set1_epi32(i32::MAX);
            let (x, sign) = (_mm512_castps_si512(self.0), _mm512_castps_si512(sign.0));
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xCA>(magnitude, x, sign))
        })
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: below `run`, so avx512f is there.
        Self(unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23)))
        })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: below `run`, so avx512f is there.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }

    #[inline(always)]
    fn max_lane(self) -> f32 {
        // SAFETY: below `run`, so avx512f is there.
        unsafe { _mm512_reduce_max_ps(self.0) }
    }

    #[inline(always)]
    fn transpose_8x8(source: &[f32], source_stride: usize, target: &mut [f32], stride: usize) {
        super::avx2::Avx2::transpose_8x8(source, source_stride, target, stride);
    }
}
