//! `PackedFormat` as Python sees it.

use kvweave_core::ops;
use pyo3::prelude::*;

use crate::arguments::{count, raised};
use crate::choices::{packed_kind, scale_dtype};
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::scalars::Number;
use crate::tensor::TensorRef;

/// What a packed page is, by kind and sizes: all that its bytes need to be read.
///
/// `kind` is "int4": codes from 0 to 15, with a scale and zero for each channel of a page's keys
/// and for each token's values. `page_tokens` P and `head_dim` D are multiples of 16, up to 256 and
/// 1024; `scales` "bf16" or "f16" is what scales and zeros are stored as. An INT4 page has
/// P·D + 4·D + 4·P bytes.
#[pyclass(frozen, eq, hash, module = "kvweave._native")]
#[derive(PartialEq, Eq, Hash)]
pub struct PackedFormat {
    pub format: ops::PackedFormat,
}

impl PackedFormat {
    /// Refuses a tensor that is no pages [pages, bytes] of it.
    pub fn expect_pages(&self, what: &str, tensor: &TensorRef) -> Result<(), Failure> {
        tensor.expect_dtype(what, DType::U8)?;
        let shape = [("pages", None), ("bytes", Some(self.format.page_bytes()))];
        tensor.expect_shape(what, &shape)?;
        tensor.expect_contiguous(what)
    }
}

#[pymethods]
impl PackedFormat {
    #[new]
    #[pyo3(signature = (kind, head_dim, page_tokens = Number::from(64), scales = "bf16"))]
    fn new(
        py: Python<'_>,
        kind: &str,
        head_dim: Number,
        page_tokens: Number,
        scales: &str,
    ) -> PyResult<Self> {
        let checks = || {
            let (kind, scales) = (packed_kind(kind)?, scale_dtype(scales)?);
            let (tokens, dim) = (count("page_tokens", page_tokens)?, count("head_dim", head_dim)?);
            Ok((kind, scales, tokens, dim))
        };
        let (kind, scales, tokens, dim) = raised(py, checks())?;
        let format = call_core(py, || ops::PackedFormat::new(kind, scales, tokens, dim))?;
        Ok(Self { format })
    }

    /// What numbers are made of.
    #[getter]
    fn kind(&self) -> &'static str {
        self.format.kind().name()
    }

    /// Elements that scales and zeros are stored as.
    #[getter]
    fn scales(&self) -> &'static str {
        self.format.scales().name()
    }

    /// P.
    #[getter]
    fn page_tokens(&self) -> usize {
        self.format.page_tokens()
    }

    /// D.
    #[getter]
    fn head_dim(&self) -> usize {
        self.format.head_dim()
    }

    /// Bytes of one page.
    #[getter]
    fn page_bytes(&self) -> usize {
        self.format.page_bytes()
    }

    fn __repr__(&self) -> String {
        format!(
            "PackedFormat({:?}, head_dim={}, page_tokens={}, scales={:?})",
            self.kind(),
            self.head_dim(),
            self.page_tokens(),
            self.scales()
        )
    }
}
