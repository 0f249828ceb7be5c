//! `PackedFormat` as Python sees it, and the bases of top-r pages and planes.

use kvweave_core::ops::{self, Bases, TopR};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Table, count, raised};
use crate::choices::{Kept, packed_kind, scale_dtype};
use crate::dlpack::{Borrowed, borrow};
use crate::dtype::DType;
use crate::failure::{Failure, call_core};
use crate::scalars::Number;
use crate::tensor::TensorRef;

/// What a format is made of: its kind, head dim, tokens of a page and dtype of scales.
type Sizes = (&'static str, usize, usize, &'static str);

/// What a packed page is, by kind and sizes: all that its bytes need to be read.
///
/// `kind` is "int4": codes from 0 to 15, with a scale and zero for each channel of a page's keys
/// and for each token's values. `page_tokens` P and `head_dim` D are multiples of 16, up to 256 and
/// 1024; `scales` "bf16" or "f16" is what scales and zeros are stored as. An INT4 page has
/// P·D + 4·D + 4·P bytes. "int8" is the same with codes from 0 to 255, in P·D bytes more.
///
/// "top-r" keeps of each vector the `kept` r largest numbers in its text's rotated basis, chosen in
/// groups of `group` g = 1, 2 or 4 neighbours, out of the basis' first `channels` C ≤ D (MosaicKV,
/// sections 4.2, 5.1 and 5.2). They are stored as `numbers`: "bf16", or "fp8" or "int4" with a
/// scale a vector. A page has 2·P·(⌈C / 8g⌉ + r·(2, 1, 1/2) + (0, 2, 2)) bytes.
///
/// "planes" has codes of 8, 4, 2 or no bits along the directions of its text's basis, which says
/// how many bits each has; keys and values share `token_bytes` a token. A page has
/// P·`token_bytes` bytes and, for flags, P/4 up to the next 16; `scales` are none.
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

    fn top_r(&self) -> Option<TopR> {
        self.format.top_r().map(|page| page.of())
    }
}

#[pymethods]
impl PackedFormat {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    #[pyo3(signature = (
        kind, head_dim, page_tokens = Number::from(64), scales = "bf16", *,
        kept = None, group = Number::from(1), channels = None, numbers = None, token_bytes = None,
    ))]
    fn new(
        py: Python<'_>,
        kind: &str,
        head_dim: Number,
        page_tokens: Number,
        scales: &str,
        kept: Option<Number>,
        group: Number,
        channels: Option<Number>,
        numbers: Option<&str>,
        token_bytes: Option<Number>,
    ) -> PyResult<Self> {
        let checks = || {
            let (tokens, dim) = (count("page_tokens", page_tokens)?, count("head_dim", head_dim)?);
            let kept = Kept { kept, group, channels, numbers, token_bytes };
            let kind = packed_kind(kind, kept, dim)?;
            Ok((kind, scale_dtype(scales)?, tokens, dim))
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

    /// r: numbers that are kept of a vector; D of other kinds than top-r.
    #[getter]
    fn kept(&self) -> usize {
        self.top_r().map_or(self.head_dim(), |of| of.kept)
    }

    /// g: neighbours that are kept together.
    #[getter]
    fn group(&self) -> usize {
        self.top_r().map_or(1, |of| of.group)
    }

    /// C: channels that numbers are kept of.
    #[getter]
    fn channels(&self) -> usize {
        self.top_r().map_or(self.head_dim(), |of| of.channels)
    }

    /// What they are stored as.
    #[getter]
    fn numbers(&self) -> &'static str {
        self.top_r().map_or(self.kind(), |of| of.numbers.name())
    }

    /// Bytes of the codes of a token's key and value in planes, None of other kinds.
    #[getter]
    fn token_bytes(&self) -> Option<usize> {
        self.format.planes().map(|page| page.token_bytes())
    }

    /// Rows of D numbers that a basis has for a page's keys, and as many for its values: C + 1 of
    /// top-r pages, 2D + 2 of planes, None of kinds that are packed in none.
    #[getter]
    fn basis_rows(&self) -> Option<usize> {
        self.format.basis_rows()
    }

    /// Refuses bases f32 [bases, pages, 2, rows, D] that no page of this format can be packed in.
    ///
    /// # Errors
    /// `InvalidArgument` for a format without bases, another dtype or shape, and for bits that are
    /// no planes or have more bytes than a page has room for. Numbers that are not finite are let
    /// through.
    fn check_bases(&self, py: Python<'_>, bases: &Bound<'_, PyAny>) -> PyResult<()> {
        let bases = borrow("bases", bases)?;
        let checks = || {
            self.format.expect_bases(true)?;
            let (data, pages) = numbers_of(&bases, &self.format)?;
            Ok(Bases { data, pages, of: &[] })
        };
        let bases = raised(py, checks())?;
        call_core(py, || bases.validate(&self.format, 0))
    }

    /// What pickles keep of it.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Sizes, Bound<'py, PyDict>)> {
        let named = PyDict::new(py);
        if let Some(TopR { kept, group, channels, numbers }) = self.top_r() {
            named.set_item("kept", kept)?;
            named.set_item("group", group)?;
            named.set_item("channels", channels)?;
            named.set_item("numbers", numbers.name())?;
        }
        named.set_item("token_bytes", self.token_bytes())?;
        Ok(((self.kind(), self.head_dim(), self.page_tokens(), self.scales()), named))
    }

    fn __repr__(&self) -> String {
        let (kind, scales) = (self.kind(), self.scales());
        let sizes = format!("head_dim={}, page_tokens={}", self.head_dim(), self.page_tokens());
        let kept = self.top_r().map_or_else(String::new, |of| {
            let TopR { kept, group, channels, numbers } = of;
            let numbers = numbers.name();
            format!(", kept={kept}, group={group}, channels={channels}, numbers={numbers:?}")
        });
        let planes = self.token_bytes().map_or_else(String::new, |n| format!(", token_bytes={n}"));
        format!("PackedFormat({kind:?}, {sizes}, scales={scales:?}{kept}{planes})")
    }
}

/// The bases of packed pages as they came from Python, borrowed.
pub struct BasesGiven<'py> {
    data: Borrowed<'py>,
    of: Table<'py>,
}

impl<'py> BasesGiven<'py> {
    /// `given`: data f32 [bases, pages, 2, rows, D] and of i32 [packed pages].
    pub fn of(
        given: Option<&(Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    ) -> PyResult<Option<BasesGiven<'py>>> {
        let Some((data, of)) = given else { return Ok(None) };
        let (data, of) = (borrow("bases", data)?, Table::of("basis of each packed page", of)?);
        Ok(Some(Self { data, of }))
    }

    /// Refuses a tensor that is written and shares memory with them.
    pub fn expect_apart(&self, what: &str, written: &TensorRef) -> Result<(), Failure> {
        written.expect_apart(what, &self.data.tensor, "bases")?;
        written.expect_apart(what, &self.of.0.tensor, "basis of each packed page")
    }

    /// As the core takes them.
    pub fn core(&self, format: &ops::PackedFormat) -> Result<Bases<'_>, Failure> {
        let (data, pages) = numbers_of(&self.data, format)?;
        Ok(Bases { data, pages, of: self.of.list("basis of each packed page")? })
    }
}

/// The numbers of some bases of a format, and how many pages they are of.
fn numbers_of<'a>(
    data: &'a Borrowed<'_>,
    format: &ops::PackedFormat,
) -> Result<(&'a [f32], usize), Failure> {
    let tensor = &data.tensor;
    tensor.expect_dtype("bases", DType::F32)?;
    tensor.expect_shape("bases", &shape_of_bases(format))?;
    tensor.expect_contiguous("bases")?;
    // SAFETY: the owner is held by `data`; writers are excluded as `arguments` says.
    Ok((unsafe { tensor.slice("bases")? }, tensor.shape()[1]))
}

/// The shape of the bases of a format's pages.
pub fn shape_of_bases(format: &ops::PackedFormat) -> [(&'static str, Option<usize>); 5] {
    let dim = Some(format.head_dim());
    [("bases", None), ("pages", None), ("2", Some(2)), ("rows", format.basis_rows()), ("D", dim)]
}
