//! Exponential and hyperbolic tangent on vectors: a few ulp, no library call, no branch.

use super::Vector;

/// Minimax coefficients of (2^x − 1)/x on [−1/2, 1/2], highest power first, as in Cephes' exp2f.
const EXP2: [f32; 6] = [
    1.535_336_2e-4,
    1.339_887_4e-3,
    9.618_437e-3,
    5.550_332_5e-2,
    2.402_264_7e-1,
    std::f32::consts::LN_2,
];

/// Coefficients of (tanh(x) − x)/x³ in x² on |x| ≤ 0.625, highest power first, as in Cephes' tanhf.
const TANH: [f32; 5] =
    [-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];

/// Below this, 2^x is flushed to 0.
const LOWEST: f32 = -127.0;

/// Adding and subtracting 1.5·2^23 rounds to an integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;

/// `2^x` for x ≤ 127; 0 from −126.5 downwards and for −∞, exactly 1 for 0, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2<V: Vector>(x: V) -> V {
    let x = V::splat(LOWEST).max_or(x);
    let shifted = x.add(V::splat(ROUND));
    let rest = x.sub(shifted.sub(V::splat(ROUND)));
    let mut sum = V::splat(EXP2[0]);
    for &coefficient in &EXP2[1..] {
        sum = sum.fma(rest, V::splat(coefficient));
    }
    sum.fma(rest, V::splat(1.0)).mul(shifted.power_of_two())
}

/// `tanh(x)`, NaN for NaN.
#[inline(always)]
pub(crate) fn tanh<V: Vector>(x: V) -> V {
    let one = V::splat(1.0);
    let magnitude = x.copy_sign(one);
    // From 10 on, tanh is 1 in f32; the cap keeps the exponential finite.
    let capped = V::splat(10.0).min_or(magnitude);
    let power = exp2(capped.mul(V::splat(2.0 * std::f32::consts::LOG2_E)));
    let large = one.sub(V::splat(2.0).div(power.add(one))).copy_sign(x);
    let square = x.mul(x);
    let mut sum = V::splat(TANH[0]);
    for &coefficient in &TANH[1..] {
        sum = sum.fma(square, V::splat(coefficient));
    }
    let small = sum.mul(square).fma(x, x);
    magnitude.if_less(V::splat(0.625), small, large)
}

#[cfg(test)]
mod tests {
    use super::super::{Kernel, Vector, on_every_set};
    use super::{exp2, tanh};

    #[derive(Clone)]
    struct Map<'a> {
        xs: &'a [f32],
        tanh: bool,
    }

    impl Kernel for Map<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<V: Vector, const C: usize>(self) -> Vec<f32> {
            let mut ys = vec![f32::NAN; self.xs.len()];
            for (x, y) in self.xs.chunks_exact(16).zip(ys.chunks_exact_mut(16)) {
                for i in (0..16).step_by(V::LANES) {
                    let x = V::load(&x[i..]);
                    if self.tanh { tanh(x) } else { exp2(x) }.store(&mut y[i..]);
                }
            }
            ys
        }
    }

    fn worst_relative(xs: &[f32], tanh: bool, exact: impl Fn(f64) -> f64) -> f64 {
        let error = |(x, y): (&f32, &f32)| {
            let exact = exact(f64::from(*x));
            (f64::from(*y) - exact).abs() / exact.abs().max(f64::MIN_POSITIVE)
        };
        let runs = on_every_set(&Map { xs, tanh });
        runs.iter().flat_map(|ys| xs.iter().zip(ys).map(error)).fold(0.0, f64::max)
    }

    #[test]
    fn exp2_is_within_two_ulp() {
        let xs: Vec<f32> = (0..16_000).map(|i| -126.0 + i as f32 * 0.015_75).collect();
        let worst = worst_relative(&xs, false, f64::exp2);
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "worst relative error {worst:e}");
    }

    #[test]
    fn exp2_special_values() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let xs = [0.0, -inf, -1e30, -127.0, nan, -1.0, -0.0, 1.0].repeat(2);
        for ys in on_every_set(&Map { xs: &xs, tanh: false }) {
            assert_eq!(ys[..4], [1.0, 0.0, 0.0, 0.0]);
            assert!(ys[4].is_nan());
            assert_eq!(ys[5..8], [0.5, 1.0, 2.0]);
        }
    }

    #[test]
    fn tanh_is_within_three_ulp() {
        let xs: Vec<f32> = (0..16_000).map(|i| (i as f32 - 8000.3) * 0.001_7).collect();
        let worst = worst_relative(&xs, true, f64::tanh);
        assert!(worst < 3.0 * f64::from(f32::EPSILON), "worst relative error {worst:e}");
    }

    #[test]
    fn tanh_special_values() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let xs = [0.0, -inf, inf, nan, 1e30, -1e30, -0.0, 0.0].repeat(2);
        for ys in on_every_set(&Map { xs: &xs, tanh: true }) {
            assert_eq!(ys[..3], [0.0, -1.0, 1.0]);
            assert!(ys[3].is_nan());
            assert_eq!(ys[4..6], [1.0, -1.0]);
        }
    }
}
