//! Eight lanes: AVX2 with FMA.

use std::arch::x86_64::*;

use super::{Kernel, Vector};

pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Runs a kernel compiled for this instruction set.
///
/// # Safety
/// - [`is_available`] must have returned true on this machine.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2, 2>()
}

/// Values exist only below [`run`]: the methods rely on it.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256);

macro_rules! lanewise {
    ($($name:ident = $intrinsic:ident;)*) => {$(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: below `run`, so avx2 is there.
            Self(unsafe { $intrinsic(self.0, other.0) })
        }
    )*};
}

impl Vector for Avx2 {
    const LANES: usize = 8;

    lanewise! {
        add = _mm256_add_ps;
        sub = _mm256_sub_ps;
        mul = _mm256_mul_ps;
        div = _mm256_div_ps;
        max_or = _mm256_max_ps;
        min_or = _mm256_min_ps;
    }

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: below `run`, so avx2 is there.
        Self(unsafe { _mm256_set1_ps(x) })
    }

    #[inline(always)]
    fn load(source: &[f32]) -> Self {
        let source = &source[..8];
        // SAFETY: below `run`, so avx2 is there; 8 elements are readable, unaligned is allowed.
        Self(unsafe { _mm256_loadu_ps(source.as_ptr()) })
    }

    #[inline(always)]
    fn store(self, target: &mut [f32]) {
        let target = &mut target[..8];
        // SAFETY: below `run`, so avx2 is there; 8 elements are writable, unaligned is allowed.
        unsafe { _mm256_storeu_ps(target.as_mut_ptr(), self.0) }
    }

    #[inline(always)]
    fn fma(self, factor: Self, addend: Self) -> Self {
        // SAFETY: below `run`, so fma is there.
        Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn if_less(self, bound: Self, then: Self, otherwise: Self) -> Self {
        // SAFETY: below `run`, so avx2 is there.
        Self(unsafe {
            let less = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0);
            _mm256_blendv_ps(otherwise.0, then.0, less)
        })
    }

    #[inline(always)]
    fn copy_sign(self, sign: Self) -> Self {
        // SAFETY: below `run`, so avx2 is there.
        Self(unsafe {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(bit, self.0), _mm256_and_ps(bit, sign.0))
        })
    }

    #[inline(always)]
    fn power_of_two(self) -> Self {
        // SAFETY: below `run`, so avx2 is there.
        Self(unsafe {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0));
            _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)))
        })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: below `run`, so avx2 is there.
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn max_lane(self) -> f32 {
        // SAFETY: below `run`, so avx2 is there.
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn transpose_8x8(source: &[f32], source_stride: usize, target: &mut [f32], stride: usize) {
        // A loop, not `from_fn`: a closure would be compiled without the instruction set.
        let mut rows = [Self::splat(0.0).0; 8];
        for i in 0..8 {
            rows[i] = Self::load(&source[i * source_stride..]).0;
        }
        let columns = transposed(rows);
        for i in 0..8 {
            Self(columns[i]).store(&mut target[i * stride..]);
        }
    }
}

/// Pairs, then quads, then halves are exchanged.
#[inline(always)]
fn transposed(rows: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: only called below `run`, so avx2 is there.
    unsafe {
        let mut pairs = rows;
        for i in (0..8).step_by(2) {
            pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
            pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
        }
        let mut quads = pairs;
        for i in [0, 4] {
            quads[i] = _mm256_shuffle_ps::<0x44>(pairs[i], pairs[i + 2]);
            quads[i + 1] = _mm256_shuffle_ps::<0xEE>(pairs[i], pairs[i + 2]);
            quads[i + 2] = _mm256_shuffle_ps::<0x44>(pairs[i + 1], pairs[i + 3]);
            quads[i + 3] = _mm256_shuffle_ps::<0xEE>(pairs[i + 1], pairs[i + 3]);
        }
        let mut columns = quads;
        for i in 0..4 {
            columns[i] = _mm256_permute2f128_ps::<0x20>(quads[i], quads[i + 4]);
            columns[i + 4] = _mm256_permute2f128_ps::<0x31>(quads[i], quads[i + 4]);
        }
        columns
    }
}
