//! What the numbers of an fp8 cache stand for.

use super::element::Element;
use super::error::{OpError, OpErrorKind, ensure};
use super::fp8::Fp8E4m3;
use half::{bf16, f16};

/// Factors of a layer's stored keys and values: k = key · k̂, v = value · v̂.
///
/// They are part of what keys and values *are*: scores, outputs, bounds of pages and what is
/// written follow. 1 and 1 unless the cache is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    /// Of keys, finite and above 0.
    pub key: f32,
    /// Of values, finite and above 0.
    pub value: f32,
}

impl KvScales {
    /// What is stored is what is meant.
    pub const ONE: Self = Self { key: 1.0, value: 1.0 };

    /// Checks the numbers, for a cache that is `quantised` or not.
    ///
    /// # Errors
    /// `InvalidArgument` that names the scale.
    pub fn validate(&self, quantised: bool) -> Result<(), OpError> {
        let named = [("key scale", self.key), ("value scale", self.value)];
        for (what, scale) in named {
            let sound = scale.is_finite() && scale > 0.0;
            ensure(sound, OpErrorKind::InvalidArgument, what, || {
                ("a finite number above 0", scale)
            })?;
        }
        ensure(quantised || *self == Self::ONE, OpErrorKind::InvalidArgument, "scales", || {
            let got = format!("{} and {}", self.key, self.value);
            ("none beside a cache that is not fp8", got)
        })
    }
}

impl Default for KvScales {
    fn default() -> Self {
        Self::ONE
    }
}

/// A cache's element that rows of `T` are stored as: themselves, or quantised.
pub trait Cached<T>: Element {
    /// Writes rows divided by `scale`. The quotient is rounded once; a cache that is not quantised
    /// has the scale 1, and bits as they are.
    ///
    /// # Panics
    /// If the lengths differ.
    fn store(source: &[T], scale: f32, target: &mut [Self]);
}

macro_rules! cached {
    ($($row:ty),*) => {
        $(
            impl Cached<$row> for $row {
                fn store(source: &[$row], _scale: f32, target: &mut [Self]) {
                    target.copy_from_slice(source);
                }
            }

            impl Cached<$row> for Fp8E4m3 {
                fn store(source: &[$row], scale: f32, target: &mut [Self]) {
                    assert_eq!(source.len(), target.len(), "slices of one length");
                    for (x, stored) in source.iter().zip(target) {
                        // An f64 quotient of two f32 is never so near a tie of e4m3 that its own
                        // rounding could decide it.
                        *stored = Self::from_f64(x.to_f64() / f64::from(scale));
                    }
                }
            }
        )*
    };
}

cached!(f32, bf16, f16);
