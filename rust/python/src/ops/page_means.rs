//! What `estimate_pages` takes from Python beside queries and tables, wherever means lie.

use kvweave_core::ops::{PageGeometry, Scoring};
use pyo3::prelude::*;

use crate::arguments::count;
use crate::failure::Failure;
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::scalars::Number;
use crate::tensor::TensorRef;

/// Means of pages and how they are attended to: `kvweave.ops.PageMeans`, whose fields have these
/// names.
#[derive(FromPyObject)]
pub struct PageMeans<'py> {
    pub means: Bound<'py, PyAny>,
    pub page_tokens: Number,
    pub layer: Number,
    pub kv_heads: Number,
    pub scale: f32,
    pub rope: Py<RopeTable>,
    pub softcap: Option<f32>,
    pub reach: Option<Py<Reach>>,
}

impl PageMeans<'_> {
    /// The geometry of the pages that means [pages, 2, D] are of.
    pub fn geometry(&self, means: &TensorRef) -> Result<PageGeometry, Failure> {
        means.expect_shape("means", &[("pages", None), ("2", Some(2)), ("D", None)])?;
        means.expect_contiguous("means")?;
        let (page_tokens, kv_heads) =
            (count("page_tokens", &self.page_tokens)?, count("kv_heads", &self.kv_heads)?);
        let (layers, head_dim) = (self.rope.get().table.layers(), means.shape()[2]);
        Ok(PageGeometry::arena(layers, kv_heads, page_tokens, head_dim))
    }

    /// How a logit is made: windows do not matter.
    pub fn scoring(&self) -> Scoring<'_> {
        let rope = &self.rope.get().table;
        Scoring { scale: self.scale, rope, window: None, softcap: self.softcap }
    }
}
