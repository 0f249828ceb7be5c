//! Eight-bit floats, as fp8 caches hold them.

use super::element::{Element, sealed};

/// OCP's FP8 E4M3 (`torch.float8_e4m3fn`): 4 bits of exponent, 3 of mantissa, NaN and no infinity.
///
/// Rounding saturates: what is too large, infinities included, becomes ±448.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct Fp8E4m3(u8);

/// Bits of NaN, the sign apart.
const NAN: u8 = 0x7f;
/// 448, the largest number.
const LARGEST: u8 = 0x7e;
const SIGN: u8 = 0x80;
const NEGATIVE_NAN: u8 = NAN | SIGN;
/// Of the smallest number with a full mantissa, 2^−6.
const LEAST_EXPONENT: i32 = -6;
const MANTISSA_BITS: i32 = 3;

/// Every number, by its bits.
static NUMBERS: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        numbers[bits] = number(bits as u8);
        bits += 1;
    }
    numbers
};

const fn number(bits: u8) -> f32 {
    let sign = ((bits & SIGN) as u32) << 24;
    let magnitude = bits & !SIGN;
    if magnitude == NAN {
        return f32::from_bits(f32::NAN.to_bits() | sign);
    }
    let (exponent, mantissa) = (magnitude >> MANTISSA_BITS, magnitude & 7);
    let size = if exponent == 0 {
        // Eighths of 2^−6.
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent as u32 + 120) << 23 | (mantissa as u32) << 20)
    };
    f32::from_bits(size.to_bits() | sign)
}

impl Fp8E4m3 {
    /// NaN without a sign.
    pub const NAN: Self = Self(NAN);

    /// The next greater number; NaN of the largest.
    #[must_use]
    pub(crate) fn above(self) -> Self {
        match self.0 {
            // Of both zeros it is the least number.
            bits if bits & !SIGN == 0 => Self(1),
            bits if bits & SIGN == 0 => Self((bits + 1).min(NAN)),
            NEGATIVE_NAN => Self::NAN,
            bits => Self(bits - 1),
        }
    }

    /// The next smaller number; NaN of the smallest.
    #[must_use]
    pub(crate) fn below(self) -> Self {
        let above = Self(self.0 ^ SIGN).above();
        if above.0 == NAN { above } else { Self(above.0 ^ SIGN) }
    }

    /// The number with these bits: any are one.
    #[must_use]
    pub fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Its bits.
    #[must_use]
    pub fn to_bits(self) -> u8 {
        self.0
    }
}

impl sealed::Sealed for Fp8E4m3 {}

impl PartialEq for Fp8E4m3 {
    fn eq(&self, other: &Self) -> bool {
        self.to_f32() == other.to_f32()
    }
}

impl Element for Fp8E4m3 {
    const NAME: &'static str = "fp8_e4m3";
    const QUANTISED: bool = true;
    const GREATEST_EXPONENT: i32 = 8;

    fn to_f32(self) -> f32 {
        NUMBERS[usize::from(self.0)]
    }

    fn from_f32(value: f32) -> Self {
        Self::from_f64(f64::from(value))
    }

    fn from_f64(value: f64) -> Self {
        if value.is_nan() {
            return Self(NAN);
        }
        let sign = if value.is_sign_negative() { SIGN } else { 0 };
        let size = value.abs();
        if size >= f64::from(number(LARGEST)) {
            return Self(LARGEST | sign);
        }
        let exponent = ((size.to_bits() >> 52) as i32 - 1023).max(LEAST_EXPONENT);
        // In units of the last place, exactly; 16 of them are the next exponent's first.
        let units = (size * f64::from(MANTISSA_BITS - exponent).exp2()).round_ties_even() as u8;
        let base = ((exponent - LEAST_EXPONENT) as u8) << MANTISSA_BITS;
        Self((base + units) | sign)
    }

    fn widen(source: &[Self], target: &mut [f32]) {
        assert_eq!(source.len(), target.len(), "slices of one length");
        for (source, target) in source.iter().zip(target) {
            *target = source.to_f32();
        }
    }

    fn narrow(source: &[f32], target: &mut [Self]) {
        assert_eq!(source.len(), target.len(), "slices of one length");
        for (&source, target) in source.iter().zip(target) {
            *target = Self::from_f32(source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_by_hand() {
        let cases = [
            (0x00, 0.0f32),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x7e, 448.0),
            (0x80, -0.0),
            (0xb8, -1.0),
            (0xfe, -448.0),
        ];
        for (bits, number) in cases {
            assert_eq!(Fp8E4m3(bits).to_f32().to_bits(), number.to_bits(), "{bits:#x}");
            assert_eq!(Fp8E4m3::from_f32(number).0, bits, "{number}");
        }
        assert!(Fp8E4m3(0x7f).to_f32().is_nan() && Fp8E4m3(0xff).to_f32().is_nan());
    }

    #[test]
    fn the_nearest_is_taken_and_the_even_one_of_two() {
        let finite = (0..0x7fu8).map(|bits| (bits, f64::from(Fp8E4m3(bits).to_f32())));
        let neighbours: Vec<_> = finite.collect();
        for pair in neighbours.windows(2) {
            let ((below, low), (above, high)) = (pair[0], pair[1]);
            let middle = (low + high) / 2.0;
            let even = if below % 2 == 0 { below } else { above };
            let rounded = |x: f64| Fp8E4m3::from_f64(x).0;
            assert_eq!([rounded(low), rounded(middle), rounded(high)], [below, even, above]);
            let near = [middle * (1.0 - 1e-12), middle * (1.0 + 1e-12)];
            assert_eq!(near.map(rounded), [below, above]);
            assert_eq!(near.map(|x| rounded(-x)), [below | SIGN, above | SIGN]);
        }
    }

    #[test]
    fn neighbours_are_the_next_numbers() {
        let mut numbers: Vec<_> = (0..=u8::MAX).map(Fp8E4m3).collect();
        numbers.retain(|x| !x.to_f32().is_nan() && x.0 != SIGN);
        numbers.sort_by(|a, b| a.to_f32().total_cmp(&b.to_f32()));
        for pair in numbers.windows(2) {
            assert_eq!((pair[0].above(), pair[1].below()), (pair[1], pair[0]));
        }
        assert_eq!((Fp8E4m3(SIGN).above().0, Fp8E4m3(SIGN).below().0), (1, 1 | SIGN));
        for bits in [LARGEST, NAN, NEGATIVE_NAN] {
            assert_eq!(Fp8E4m3(bits).above().0, NAN);
            assert_eq!(Fp8E4m3(bits ^ SIGN).below().0, NAN);
        }
    }

    #[test]
    fn too_large_saturates_and_nan_stays() {
        for x in [448.1, 464.0, 480.0, 1e30, f32::MAX, f32::INFINITY] {
            assert_eq!([Fp8E4m3::from_f32(x).0, Fp8E4m3::from_f32(-x).0], [0x7e, 0xfe]);
        }
        assert_eq!(Fp8E4m3::from_f32(f32::NAN).0, NAN);
    }
}
