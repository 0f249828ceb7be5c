//! Pages in e4m3 numbers, each times a power of two of its own.

use super::element::Element;
use super::fp8::Fp8E4m3;
use super::scales::Cached;

/// What the e4m3 numbers of a page's keys, or of its values, stand for: x = 2^(bits − 127) · x̂, an
/// E8M0 number as in OCP's microscaling formats.
///
/// It is the least power of two with which the greatest finite magnitude rounds to 448 or less,
/// from 2^−126 on, and of f16, whose least number is 2^−24, from 2^−15 on; and at most what keeps
/// 448 of it finite in the numbers' own type. So the greatest of what is kept is 240 to 448 of it
/// unless that is tiny, and numbers that come back are kept as the same scale and the same bits
/// again: nothing is ever rounded twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageScale(u8);

const BIAS: i32 = 127;
const MANTISSA_BITS: u32 = 23;
/// Of 464 = 1.8125 · 2^8 in f32: the greatest that e4m3 rounds to 448, which is even.
const GREATEST_MANTISSA: u32 = 0x0068_0000;
/// Of 448 = 1.75 · 2^8: the greatest that e4m3 has.
const LARGEST_MANTISSA: u32 = 0x0060_0000;
/// Of 448 and 464.
const EXPONENT: i32 = 8;
const LEAST: i32 = -126;

impl PageScale {
    /// The scale of some numbers.
    #[must_use]
    pub fn of<T: Element>(numbers: &[T]) -> Self {
        Self::up_to(numbers, GREATEST_MANTISSA)
    }

    /// The least power of two, from 2^−126 on, of which 448 is no less than any finite magnitude:
    /// whichever way these are rounded, the result is a number.
    #[must_use]
    pub fn covering(numbers: &[f32]) -> Self {
        Self::up_to(numbers, LARGEST_MANTISSA)
    }

    fn up_to<T: Element>(numbers: &[T], mantissa: u32) -> Self {
        let magnitudes = numbers.iter().map(|x| x.to_f32().abs()).filter(|x| x.is_finite());
        let bits = magnitudes.fold(0.0, f32::max).to_bits();
        let carry = i32::from(bits & ((1 << MANTISSA_BITS) - 1) > mantissa);
        let exponent = (bits >> MANTISSA_BITS) as i32 - BIAS - EXPONENT + carry;
        let least = LEAST.max(-T::GREATEST_EXPONENT);
        let power = exponent.clamp(least, T::GREATEST_EXPONENT - EXPONENT);
        Self((power + BIAS) as u8)
    }

    /// The scale with these bits: any are one.
    #[must_use]
    pub fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Its bits.
    #[must_use]
    pub fn to_bits(self) -> u8 {
        self.0
    }

    /// The power of two.
    #[must_use]
    pub fn factor(self) -> f32 {
        (f64::from(i32::from(self.0) - BIAS).exp2()) as f32
    }

    /// Rounds numbers once. Infinities become ±448 of the scale, and NaN stays NaN.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn round<T: Element>(self, numbers: &[T], target: &mut [Fp8E4m3])
    where
        Fp8E4m3: Cached<T>,
    {
        Fp8E4m3::store(numbers, self.factor(), target);
    }

    /// What they stand for, exactly.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn widen<T: Element>(self, kept: &[Fp8E4m3], target: &mut [T]) {
        assert_eq!(kept.len(), target.len(), "slices of one length");
        let factor = self.factor();
        for (kept, number) in kept.iter().zip(target) {
            *number = T::from_f32(kept.to_f32() * factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn kept<T: Element>(numbers: &[T]) -> (u8, Vec<u8>, Vec<T>)
    where
        Fp8E4m3: Cached<T>,
    {
        let scale = PageScale::of(numbers);
        let mut rounded = vec![Fp8E4m3::default(); numbers.len()];
        scale.round(numbers, &mut rounded);
        let mut back = vec![T::default(); numbers.len()];
        scale.widen(&rounded, &mut back);
        (scale.to_bits(), rounded.iter().map(|x| x.to_bits()).collect(), back)
    }

    /// Each as the greatest of three: near enough, finite, and the same bits a second time.
    fn all_of<T: Element + std::fmt::Debug>(numbers: impl Iterator<Item = T>)
    where
        Fp8E4m3: Cached<T>,
    {
        for greatest in numbers.filter(|x| x.to_f32().is_finite()) {
            let near = T::from_f32(greatest.to_f32() * 0.37);
            let page = [greatest, near, T::from_f32(-greatest.to_f32() / 300.0)];
            let (scale, bits, back) = kept(&page);
            let (again, bits_again, _) = kept(&back);
            assert_eq!((again, &bits_again), (scale, &bits), "{page:?}");
            let (size, factor) =
                (greatest.to_f32().abs(), f64::from(PageScale(scale).factor()) as f32);
            let beyond = size / factor > 464.0;
            assert!(!beyond || i32::from(scale) - 127 == T::GREATEST_EXPONENT - 8, "{page:?}");
            for (x, y) in page.iter().map(|x| x.to_f32()).zip(back.iter().map(|x| x.to_f32())) {
                let step = (x.abs() / 16.0).max(factor / 1024.0);
                assert!(y.is_finite() && (beyond || (x - y).abs() <= step), "{x} {y} {factor}");
            }
        }
    }

    #[test]
    fn every_greatest_number_comes_back_near_and_once_rounded() {
        all_of((0..=u16::MAX).map(bf16::from_bits));
        all_of((0..=u16::MAX).map(f16::from_bits));
        all_of((0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x9e37)));
    }

    #[test]
    fn scales_by_hand() {
        let of = |x: f32| i32::from(PageScale::of(&[0.0, x]).to_bits()) - 127;
        let cases = [(448.0, 0), (464.0, 0), (464.1, 1), (511.9, 1), (1.0, -8), (3.0, -7)];
        for (x, power) in cases.into_iter().chain([(0.0, -126), (f32::MAX, 119), (1e-44, -126)]) {
            assert_eq!((of(x), of(-x)), (power, power), "{x}");
        }
        assert_eq!(PageScale::of(&[f16::MAX]).factor(), 128.0);
        assert_eq!(PageScale::of(&[f16::ZERO]).factor(), 2f32.powi(-15));
        assert_eq!(PageScale::of(&[f32::NAN, f32::INFINITY, 1.0]).factor(), 2f32.powi(-8));
    }

    #[test]
    fn what_is_not_finite_saturates_or_stays() {
        let (_, bits, back) = kept(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 448.0]);
        assert_eq!((bits[0], bits[1], back[0]), (0x7e, 0xfe, 448.0));
        assert!(back[2].is_nan());
        // Alone they are 448 of the least scale, which their own type has.
        let (scale, bits, back) = kept(&[f16::INFINITY, f16::NEG_INFINITY]);
        assert_eq!(kept(&back), (scale, bits, back.clone()));
        assert!(back[0] > f16::ZERO);
    }
}
