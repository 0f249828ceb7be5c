//! Numbers as codes: how a range of them is divided into equal steps.

use half::{bf16, f16};

/// Elements that scales and zeros are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleDtype {
    /// The range of f32.
    Bf16,
    /// Eight times finer, up to 65504.
    F16,
}

impl ScaleDtype {
    /// Name of the type in messages: `bf16`, `f16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The number with these bits.
    #[must_use]
    pub fn widen(self, bits: u16) -> f32 {
        match self {
            Self::Bf16 => bf16::from_bits(bits).to_f32(),
            Self::F16 => f16::from_bits(bits).to_f32(),
        }
    }

    /// Bits of the largest number that is not above a finite x.
    fn below(self, x: f32) -> u16 {
        match self {
            Self::Bf16 => bf16_towards(x, x < 0.0),
            Self::F16 => {
                let near = f16::from_f32(x);
                match near.to_f32() <= x {
                    true => near.to_bits(),
                    false if near.to_f32() == 0.0 => 0x8001,
                    false if near.is_sign_negative() => near.to_bits() + 1,
                    false => near.to_bits() - 1,
                }
            }
        }
    }

    /// Bits of the least number that is not below a finite x of at least 0.
    fn above(self, x: f32) -> u16 {
        match self {
            Self::Bf16 => bf16_towards(x, true),
            Self::F16 => {
                let near = f16::from_f32(x);
                near.to_bits() + u16::from(near.to_f32() < x)
            }
        }
    }

    /// Bits of NaN.
    pub(super) fn nan(self) -> u16 {
        match self {
            Self::Bf16 => 0x7FC0,
            Self::F16 => 0x7E00,
        }
    }

    /// Bits of the least scale of which `reach` are not below `largest`; NaN where that is not
    /// finite, or no such scale is.
    pub(super) fn scale_of(self, largest: f32, reach: f32) -> u16 {
        let size = largest / reach;
        let scale = if size.is_finite() { self.above(size) } else { self.nan() };
        if self.widen(scale).is_finite() { scale } else { self.nan() }
    }
}

/// The upper half of an f32 is the bf16 nearer to 0; the other one follows it.
fn bf16_towards(x: f32, away_from_zero: bool) -> u16 {
    let (upper, rest) = ((x.to_bits() >> 16) as u16, x.to_bits() & 0xFFFF);
    upper + u16::from(away_from_zero && rest != 0)
}

/// Equal steps that numbers are rounded to: a code c stands for `zero + scale · c`.
///
/// The zero is the least of the numbers rounded down, and the scale rounded up, so that rounding
/// them leaves none of the numbers outside: a number and what its code stands for differ by at
/// most half a scale. All arithmetic is f32, in this order, in every version: so all make the same
/// bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bits of the scale.
    pub scale: u16,
    /// Bits of the zero.
    pub zero: u16,
}

impl Step {
    /// Of no numbers at all.
    pub const NONE: Self = Self { scale: 0, zero: 0 };

    /// Steps for numbers from `least` to `greatest`. Numbers that are all the same have a scale of
    /// 0, and come back exactly where they are ones of `scales`. Where a number is NaN or infinite
    /// (`least` or `greatest` is then neither), or a step beyond what `scales` hold, scale and zero
    /// are NaN: all of the numbers are then.
    #[must_use]
    pub fn of(least: f32, greatest: f32, largest_code: u8, scales: ScaleDtype) -> Self {
        let nan = Self { scale: scales.nan(), zero: scales.nan() };
        if !(least.is_finite() && greatest.is_finite()) {
            return nan;
        }
        // Adding zero makes −0 one.
        let zero = scales.below(least + 0.0);
        let size = ((greatest + 0.0) - scales.widen(zero)) / f32::from(largest_code);
        if !(scales.widen(zero).is_finite() && size.is_finite()) {
            return nan;
        }
        let scale = scales.above(size);
        if scales.widen(scale).is_finite() { Self { scale, zero } } else { nan }
    }

    /// Zero and scale as numbers.
    #[must_use]
    pub fn widen(self, scales: ScaleDtype) -> WideStep {
        WideStep { scale: scales.widen(self.scale), zero: scales.widen(self.zero) }
    }
}

/// A [`Step`] to calculate with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WideStep {
    /// Between two codes.
    pub scale: f32,
    /// What code 0 stands for.
    pub zero: f32,
}

impl WideStep {
    /// The code nearest to x, of two the even one.
    #[must_use]
    pub fn code(self, x: f32, largest_code: u8) -> u8 {
        if self.scale > 0.0 {
            let steps = ((x - self.zero) / self.scale).round_ties_even();
            steps.clamp(0.0, f32::from(largest_code)) as u8
        } else {
            0
        }
    }

    /// What a code stands for: the product is exact, the sum is rounded once to f32.
    #[must_use]
    pub fn number(self, code: u8) -> f32 {
        self.zero + self.scale * f32::from(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [ScaleDtype; 2] = [ScaleDtype::Bf16, ScaleDtype::F16];

    #[test]
    fn zeros_are_rounded_down_and_scales_up() {
        for scales in BOTH {
            for bits in (0..0x7F7F_FFFFu32).step_by(65_521) {
                let x = f32::from_bits(bits);
                let up = scales.widen(scales.above(x));
                assert!(up >= x && scales.widen(scales.above(x).saturating_sub(1)) <= x.max(0.0));
                for x in [x, -x] {
                    let down = scales.below(x);
                    assert!(scales.widen(down) <= x, "{x}");
                    let next = if scales.widen(down) < 0.0 { down - 1 } else { down + 1 };
                    let next = scales.widen(next);
                    assert!(next > x || next.is_nan() || scales.widen(down) == x, "{x}");
                }
            }
        }
    }

    #[test]
    fn what_is_constant_is_exact() {
        for scales in BOTH {
            for x in [0.0f32, -0.0, 1.0, -3.25, 1e-6, 60_000.0, -0.1] {
                let x = scales.widen(scales.below(x));
                let step = Step::of(x, x, 15, scales);
                assert_eq!(step.scale, 0);
                assert_eq!(step.widen(scales).number(step.widen(scales).code(x, 15)), x);
            }
        }
    }

    #[test]
    fn a_number_is_half_a_scale_away_at_most() {
        for scales in BOTH {
            for (least, greatest) in [(-1.0f32, 1.0f32), (100.03, 100.3), (-7e-5, 3e4), (0.0, 1e-7)]
            {
                let step = Step::of(least, greatest, 15, scales).widen(scales);
                for i in 0..=1000u16 {
                    let x = least + (greatest - least) * (f32::from(i) / 1000.0);
                    let back = step.number(step.code(x, 15));
                    assert!((x - back).abs() <= 0.501 * step.scale + x.abs() * 1e-6, "{x} {back}");
                }
            }
        }
    }

    #[test]
    fn what_no_step_reaches_is_nan() {
        for (least, greatest) in
            [(f32::NAN, 1.0), (f32::NEG_INFINITY, 1.0), (0.0, f32::INFINITY), (f32::MIN, f32::MAX)]
        {
            let step = Step::of(least, greatest, 15, ScaleDtype::Bf16).widen(ScaleDtype::Bf16);
            assert!(step.number(step.code(1.0, 15)).is_nan());
        }
        assert!(Step::of(-1e6, 0.0, 15, ScaleDtype::F16).widen(ScaleDtype::F16).zero.is_nan());
    }
}
