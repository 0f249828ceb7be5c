//! What `score_pages` takes from Python beside queries and tables, wherever bounds lie.

use kvweave_core::ops::{PageGeometry, Scoring};
use pyo3::prelude::*;

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
}

impl BoundedPages<'_> {
    /// The geometry of the pages that bounds [pages, 3, D] are of.
    pub fn geometry(&self, bounds: &TensorRef) -> Result<PageGeometry, Failure> {
        bounds.expect_dtype("bounds", DType::F32)?;
        bounds.expect_shape("bounds", &[("pages", None), ("3", Some(3)), ("D", None)])?;
        self.geometry_of(bounds)
    }

    /// The same where bounds may also be [pages, 2, D] of the elements of keys; whether they are.
    pub fn geometry_or_keys(
        &self,
        bounds: &TensorRef,
        keys: DType,
    ) -> Result<(PageGeometry, bool), Failure> {
        let are_keys = keys.bytes() == 2 && bounds.dtype == keys;
        if !are_keys {
            return Ok((self.geometry(bounds)?, false));
        }
        bounds.expect_shape("bounds", &[("pages", None), ("2", Some(2)), ("D", None)])?;
        Ok((self.geometry_of(bounds)?, true))
    }

    fn geometry_of(&self, bounds: &TensorRef) -> Result<PageGeometry, Failure> {
        bounds.expect_contiguous("bounds")?;
        let (page_tokens, kv_heads) =
            (count("page_tokens", self.page_tokens)?, count("kv_heads", self.kv_heads)?);
        let (layers, head_dim) = (self.rope.get().table.layers(), bounds.shape()[2]);
        Ok(PageGeometry::arena(layers, kv_heads, page_tokens, head_dim))
    }

    /// How a score is made: windows do not matter.
    pub fn scoring(&self) -> Scoring<'_> {
        let rope = &self.rope.get().table;
        Scoring { scale: self.scale, rope, window: None, softcap: self.softcap }
    }
}
