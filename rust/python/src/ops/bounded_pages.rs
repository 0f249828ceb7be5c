//! What `score_pages` takes from Python beside queries and tables, wherever bounds lie.

use kvweave_core::ops::{PageGeometry, PageScore, Scoring};
use kvweave_cuda::BoundNumbers;
use pyo3::prelude::*;

use super::cuda::arguments::{Place, extent_of};
use crate::arguments::count;
use crate::dtype::DType;
use crate::failure::Failure;
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::scalars::Number;
use crate::tensor::TensorRef;

/// Bounds of pages and how they are scored: `kvweave.ops.BoundedPages`, whose fields have these
/// names.
#[derive(FromPyObject)]
pub struct BoundedPages<'py> {
    pub bounds: Bound<'py, PyAny>,
    pub page_tokens: Number,
    pub layer: Number,
    pub kv_heads: Number,
    pub scale: f32,
    pub rope: Py<RopeTable>,
    pub softcap: Option<f32>,
    pub reach: Option<Py<Reach>>,
    pub score: String,
    pub shared: String,
    pub scales: Option<Bound<'py, PyAny>>,
}

/// The numbers that bounds are kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumbersOfBounds {
    /// [pages, 3, D] of f32.
    F32,
    /// [pages, 2, D] of the 16 bits of keys.
    Keys,
    /// [pages, 2, D] or, for means, [pages, 1, D] of e4m3, with a scale a page.
    Fp8(PageScore),
}

impl NumbersOfBounds {
    /// Those that a tensor is of, beside `keys` of 16 bits where they do.
    ///
    /// # Errors
    /// For scales where there need be none, and none where there have to be.
    pub fn of(bounds: &TensorRef, keys: Option<DType>, scaled: bool) -> Result<Self, Failure> {
        if bounds.dtype != DType::Fp8E4m3 {
            if scaled {
                let got = format!("some beside {}", bounds.dtype.name());
                return Err(Failure::invalid("scales of bounds", "none", got));
            }
            let are_keys = keys.is_some_and(|keys| keys.bytes() == 2 && bounds.dtype == keys);
            return Ok(if are_keys { Self::Keys } else { Self::F32 });
        }
        if !scaled {
            let expected = "a byte a page beside float8_e4m3fn";
            return Err(Failure::invalid("scales of bounds", expected, "none"));
        }
        let means = bounds.shape().get(1) == Some(&1);
        Ok(Self::Fp8(if means { PageScore::Mean } else { PageScore::MinMax }))
    }

    /// Their dtype, and the vectors of a page as a shape says them.
    pub fn layout(self, bounds: &TensorRef) -> (DType, (&'static str, Option<usize>)) {
        match self {
            Self::F32 => (DType::F32, ("3", Some(3))),
            Self::Keys => (bounds.dtype, ("2", Some(2))),
            Self::Fp8(PageScore::MinMax) => (DType::Fp8E4m3, ("2", Some(2))),
            Self::Fp8(PageScore::Mean) => (DType::Fp8E4m3, ("1", Some(1))),
        }
    }

    /// The same on a device, of so many pages.
    pub fn on_device(
        self,
        place: &Place,
        scales: Option<&TensorRef>,
        pages: usize,
    ) -> Result<BoundNumbers, Failure> {
        match (self, scales) {
            (Self::Fp8(score), Some(scales)) => {
                place.expect("scales", scales, DType::U8)?;
                scales.expect_shape("scales", &[("pages", Some(pages))])?;
                scales.expect_contiguous("scales")?;
                Ok(BoundNumbers::Fp8 { score, scales: extent_of("scales", scales)? })
            }
            (Self::Keys, _) => Ok(BoundNumbers::Keys),
            _ => Ok(BoundNumbers::F32),
        }
    }
}

impl BoundedPages<'_> {
    /// The geometry of the pages that bounds are of, and what numbers these are; `keys` where they
    /// may be of the 16 bits of keys.
    pub fn geometry(
        &self,
        bounds: &TensorRef,
        keys: Option<DType>,
    ) -> Result<(PageGeometry, NumbersOfBounds), Failure> {
        let numbers = NumbersOfBounds::of(bounds, keys, self.scales.is_some())?;
        let (dtype, vectors) = numbers.layout(bounds);
        bounds.expect_dtype("bounds", dtype)?;
        bounds.expect_shape("bounds", &[("pages", None), vectors, ("D", None)])?;
        Ok((self.geometry_of(bounds)?, numbers))
    }

    fn geometry_of(&self, bounds: &TensorRef) -> Result<PageGeometry, Failure> {
        bounds.expect_contiguous("bounds")?;
        let (page_tokens, kv_heads) =
            (count("page_tokens", &self.page_tokens)?, count("kv_heads", &self.kv_heads)?);
        let (layers, head_dim) = (self.rope.get().table.layers(), bounds.shape()[2]);
        Ok(PageGeometry::arena(layers, kv_heads, page_tokens, head_dim))
    }

    /// How a score is made: windows do not matter.
    pub fn scoring(&self) -> Scoring<'_> {
        let rope = &self.rope.get().table;
        Scoring { scale: self.scale, rope, window: None, softcap: self.softcap }
    }
}
