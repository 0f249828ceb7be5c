//! The element types a KV cache may hold.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

pub(super) mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// A stored number: `f32`, `bf16`, `f16` or, in caches, [`Fp8E4m3`](crate::ops::Fp8E4m3).
/// Arithmetic is done wider and rounded once.
pub trait Element: sealed::Sealed + Copy + Default + PartialEq + Send + Sync + 'static {
    /// Name of the type in messages: `f32`, `bf16`, `f16`, `fp8_e4m3`.
    const NAME: &'static str;

    /// Whether numbers are stored divided by a scale: see [`KvScales`](crate::ops::KvScales).
    const QUANTISED: bool = false;

    /// Exponent of the greatest finite number.
    const GREATEST_EXPONENT: i32;

    /// Exact widening.
    fn to_f32(self) -> f32;

    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Exact widening.
    fn to_f64(self) -> f64 {
        f64::from(self.to_f32())
    }

    /// Rounds to nearest, ties to even, in one step.
    fn from_f64(value: f64) -> Self;

    /// Widens a slice into one of the same length.
    ///
    /// # Panics
    /// If the lengths differ.
    fn widen(source: &[Self], target: &mut [f32]);

    /// Rounds a slice into one of the same length.
    ///
    /// # Panics
    /// If the lengths differ.
    fn narrow(source: &[f32], target: &mut [Self]);
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    const GREATEST_EXPONENT: i32 = f32::MAX_EXP - 1;

    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }

    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the purpose")]
    fn from_f64(value: f64) -> Self {
        value as f32
    }

    fn widen(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }
}

macro_rules! half_element {
    ($type:ty, $name:literal, $widen:expr) => {
        impl Element for $type {
            const NAME: &'static str = $name;
            const GREATEST_EXPONENT: i32 = <$type>::MAX_EXP - 1;

            fn to_f32(self) -> f32 {
                <$type>::to_f32(self)
            }

            fn from_f32(value: f32) -> Self {
                <$type>::from_f32(value)
            }

            fn from_f64(value: f64) -> Self {
                <$type>::from_f64(value)
            }

            fn widen(source: &[Self], target: &mut [f32]) {
                $widen(source, target);
            }

            fn narrow(source: &[f32], target: &mut [Self]) {
                target.convert_from_f32_slice(source);
            }
        }
    };
}

half_element!(bf16, "bf16", widen_bf16);
half_element!(f16, "f16", HalfFloatSliceExt::convert_to_f32_slice);

/// A bf16 is the upper half of an f32, NaN included: a shift, which vectorises.
fn widen_bf16(source: &[bf16], target: &mut [f32]) {
    assert_eq!(source.len(), target.len(), "slices of one length");
    for (source, target) in source.iter().zip(target) {
        *target = f32::from_bits(u32::from(source.to_bits()) << 16);
    }
}
