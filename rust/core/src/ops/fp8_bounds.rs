//! Bounds of pages in e4m3 numbers, which stay bounds.

use super::element::Element;
use super::error::{OpError, OpErrorKind, ensure, ensure_rows, ensure_size};
use super::fp8::Fp8E4m3;
use super::page_scale::PageScale;
use super::page_score::PageScore;

/// Rows of bounds in e4m3: `N` and `S` are slices, mutable ones where bounds are written.
///
/// Of min–max scores these are the least key rounded down and the greatest rounded up, so that no
/// key scores higher than by them, as by exact ones; of scores by means the mean key alone, rounded
/// to the nearest.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Bounds<N, S> {
    /// The score that they are made for.
    pub score: PageScore,
    /// [pages, 2, D]: min and max; for means [pages, 1, D].
    pub numbers: N,
    /// [pages]: what a page's numbers stand for, the bits of a [`PageScale`].
    pub scales: S,
}

impl<N: AsRef<[Fp8E4m3]>, S: AsRef<[u8]>> Fp8Bounds<N, S> {
    /// How many pages they are of.
    ///
    /// # Errors
    /// When numbers and scales do not belong together.
    pub fn pages(&self, head_dim: usize) -> Result<usize, OpError> {
        let row = fp8_vectors(self.score) * head_dim;
        let pages = ensure_rows("bounds", row, self.numbers.as_ref().len())?;
        ensure_size("scales of bounds", &[pages], self.scales.as_ref().len())?;
        Ok(pages)
    }

    /// A page's bounds in f32 [vectors, D]: exactly what its numbers stand for.
    ///
    /// # Panics
    /// If the page is none of theirs.
    pub fn widen(&self, page: usize, target: &mut [f32]) {
        let numbers = &self.numbers.as_ref()[page * target.len()..][..target.len()];
        PageScale::from_bits(self.scales.as_ref()[page]).widen(numbers, target);
    }

    /// Proves that they are made for a score.
    ///
    /// # Errors
    /// A shape error that names the bounds.
    pub fn expect(&self, score: PageScore) -> Result<(), OpError> {
        ensure(self.score == score, OpErrorKind::Shape, "bounds", || {
            let vectors = |score| format!("{} vectors a page in fp8", fp8_vectors(score));
            (vectors(score), vectors(self.score))
        })
    }
}

/// Vectors that bounds in e4m3 have of a page.
#[must_use]
pub fn fp8_vectors(score: PageScore) -> usize {
    match score {
        PageScore::MinMax => 2,
        PageScore::Mean => 1,
    }
}

/// Rounds a page's bounds [3, D] of f32 to `target` [vectors, D]; its scale.
///
/// All vectors of a page have one power of two, the least of which 448 is no less than any of their
/// finite elements. Where no e4m3 number of that scale is on the right side of a bound, an infinite
/// one among them, it becomes NaN, as NaN does: such a page scores NaN and is chosen before all
/// others. Zero has no sign, so every version has the same bytes.
///
/// # Panics
/// If the lengths differ.
pub fn round_bounds(score: PageScore, bounds: &[f32], target: &mut [Fp8E4m3]) -> PageScale {
    let dim = bounds.len() / 3;
    let kept = match score {
        PageScore::MinMax => &bounds[..2 * dim],
        PageScore::Mean => &bounds[2 * dim..],
    };
    assert_eq!(kept.len(), target.len(), "slices of one length");
    let scale = PageScale::covering(kept);
    let factor = scale.factor();
    for (d, (&x, target)) in kept.iter().zip(target).enumerate() {
        let way = match score {
            PageScore::Mean => Way::Nearest,
            PageScore::MinMax if d < dim => Way::Down,
            PageScore::MinMax => Way::Up,
        };
        *target = rounded(x, factor, way);
    }
    scale
}

#[derive(Clone, Copy)]
enum Way {
    Down,
    Up,
    Nearest,
}

/// The e4m3 number for x / factor, a power of two.
fn rounded(x: f32, factor: f32, way: Way) -> Fp8E4m3 {
    if !x.is_finite() {
        return Fp8E4m3::NAN;
    }
    // Both are exact in f64.
    let near = Fp8E4m3::from_f64(f64::from(x) / f64::from(factor));
    let back = near.to_f64() * f64::from(factor);
    let kept = match way {
        Way::Down if back > f64::from(x) => near.below(),
        Way::Up if back < f64::from(x) => near.above(),
        _ => near,
    };
    if kept.to_f32() == 0.0 { Fp8E4m3::default() } else { kept }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Least and greatest of one element of a page, as they come back.
    fn back(least: f32, greatest: f32) -> [f32; 2] {
        let mut kept = [Fp8E4m3::default(); 2];
        let scale = round_bounds(PageScore::MinMax, &[least, greatest, 0.0], &mut kept);
        let bounds =
            Fp8Bounds { score: PageScore::MinMax, numbers: kept, scales: [scale.to_bits()] };
        let mut wide = [0.0; 2];
        bounds.widen(0, &mut wide);
        wide
    }

    #[test]
    fn bounds_by_hand() {
        let cases = [
            // 1 is 256 of 2^−8, so a step there is 32 of it: an eighth.
            ([1.0, 1.0], [1.0, 1.0]),
            ([0.99, 1.01], [0.9375, 1.125]),
            ([-1.01, -0.99], [-1.125, -0.9375]),
            ([-0.0, 0.0], [0.0, 0.0]),
            ([1e-30, 448.0], [0.0, 448.0]),
            ([-448.1, 1e-30], [-480.0, 2f32.powi(-8)]),
            ([464.0, 464.0], [448.0, 480.0]),
        ];
        for (exact, wanted) in cases {
            assert_eq!(back(exact[0], exact[1]), wanted, "{exact:?}");
        }
        let least = f32::from_bits(1);
        assert_eq!(back(-least, least), [-2f32.powi(-135), 2f32.powi(-135)]);
    }

    #[test]
    fn rounded_bounds_hold_what_the_exact_ones_hold_and_little_more() {
        let numbers = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x1e37));
        for x in numbers.filter(|x| x.is_finite() && x.abs() < 2.97e38) {
            for other in [x, x * 0.4, -x, 0.0, x / 1e7] {
                let (least, greatest) = (x.min(other), x.max(other));
                let [low, high] = back(least, greatest);
                assert!(low <= least && greatest <= high, "{least} {greatest}: {low} {high}");
                let size = least.abs().max(greatest.abs());
                let near = |a: f32, b: f32| (a - b).abs() <= (a.abs() / 8.0).max(size / 1.1e5);
                let tiny = size < 2f32.powi(-118);
                assert!(tiny || near(least, low) && near(greatest, high), "{least} {greatest}");
            }
        }
    }

    #[test]
    fn what_no_number_bounds_is_nan() {
        for x in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert!(back(x, 1.0)[0].is_nan() && back(1.0, x)[1].is_nan());
            assert_eq!(back(x, 1.0)[1], 1.0);
        }
        assert!(back(0.0, f32::MAX)[1].is_nan() && back(f32::MIN, 0.0)[0].is_nan());
        assert_eq!(back(f32::MAX, f32::MAX)[0], 448.0 * 2f32.powi(119));
    }

    #[test]
    fn means_are_the_nearest() {
        let mut kept = [Fp8E4m3::default(); 3];
        let bounds = [9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 1.06, -1.07];
        let scale = round_bounds(PageScore::Mean, &bounds, &mut kept);
        assert_eq!(scale.factor(), 2f32.powi(-8));
        assert_eq!(kept.map(|x| x.to_f32() * scale.factor()), [1.0, 1.0, -1.125]);
    }

    #[test]
    fn bounds_are_of_whole_pages() {
        let dim = 8;
        let (numbers, scales) = (vec![Fp8E4m3::default(); 4 * dim], [0u8; 4]);
        let of = |score, pages: usize| Fp8Bounds {
            score,
            numbers: &numbers[..],
            scales: &scales[..pages],
        };
        assert_eq!(of(PageScore::Mean, 4).pages(dim), Ok(4));
        assert_eq!(of(PageScore::MinMax, 2).pages(dim), Ok(2));
        for (score, pages) in [(PageScore::Mean, 2), (PageScore::MinMax, 4)] {
            let error = of(score, pages).pages(dim).expect_err("a refusal");
            assert_eq!((error.kind(), error.what()), (OpErrorKind::Shape, "scales of bounds"));
        }
        let other = of(PageScore::Mean, 4).expect(PageScore::MinMax).expect_err("a refusal");
        assert_eq!(other.what(), "bounds");
    }
}
