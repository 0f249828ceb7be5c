//! The numbers that bounds of pages are kept in on a device.

use kvweave_core::ops::{PageScore, fp8_vectors};

use crate::error::CudaError;
use crate::operands::DeviceTensor;

/// Bounds of pages [pages, vectors, D], contiguous.
#[derive(Clone, Copy, Debug)]
pub enum BoundNumbers {
    /// f32: min, max and mean.
    F32,
    /// 16 bits an element: the least and the greatest key alone.
    Keys,
    /// e4m3: see `kvweave_core::ops::Fp8Bounds`.
    Fp8 {
        /// The score that they are made for.
        score: PageScore,
        /// u8 [pages].
        scales: DeviceTensor,
    },
}

impl BoundNumbers {
    /// Vectors of a page.
    #[must_use]
    pub fn vectors(self) -> usize {
        match self {
            Self::F32 => 3,
            Self::Keys => 2,
            Self::Fp8 { score, .. } => fp8_vectors(score),
        }
    }

    /// The address of scales, or 0, of bounds of so many pages.
    pub(crate) fn scales(self, pages: usize) -> Result<u64, CudaError> {
        let Self::Fp8 { scales, .. } = self else { return Ok(0) };
        scales.expect("scales of bounds", pages)?;
        Ok(scales.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_in_fp8_have_a_scale_a_page() {
        let scales = DeviceTensor { address: 64, len: 7 };
        let of = |score| BoundNumbers::Fp8 { score, scales };
        let all =
            [BoundNumbers::F32, BoundNumbers::Keys, of(PageScore::MinMax), of(PageScore::Mean)];
        assert_eq!(all.map(BoundNumbers::vectors), [3, 2, 2, 1]);
        assert_eq!(all.map(|bounds| bounds.scales(7).ok()), [Some(0), Some(0), Some(64), Some(64)]);
        assert!(of(PageScore::Mean).scales(8).is_err());
    }
}
