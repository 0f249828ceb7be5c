//! `KvShape` and `HeadClassMap` as Python sees them.

use std::hash::{DefaultHasher, Hash, Hasher};

use kvweave_core::{self as core, CacheConfig, GroupId, HeadClass};
use pyo3::prelude::*;

use crate::arguments::count;
use crate::drawn::drawn;
use crate::dtype::{kv_dtype, kv_dtype_name};
use crate::failure::{Failure, call_core};
use crate::scalars::{Number, Text};

/// What a shape is made of: layers, KV heads, head dim, tokens of a page and dtype.
type Sizes = (u32, u32, u32, u32, &'static str);

/// The KV geometry of a model: L layers of G KV heads of D elements, pages of P tokens, a dtype.
#[pyclass(frozen, module = "kvweave._native")]
pub struct KvShape(pub core::KvShape);

#[pymethods]
impl KvShape {
    #[new]
    #[pyo3(signature = (layers, kv_heads, head_dim, page_tokens = Number::from(16), dtype = None))]
    fn new(
        py: Python<'_>,
        layers: Number,
        kv_heads: Number,
        head_dim: Number,
        page_tokens: Number,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let dtype = dtype.map_or(Ok(core::KvDtype::F32), kv_dtype)?;
        let sizes = [
            ("layers", layers),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("page_tokens", page_tokens),
        ];
        call_core(py, || {
            let [layers, kv_heads, head_dim, page_tokens] = sizes.map(|(what, size)| {
                let size = size.whole(what)?;
                u32::try_from(size).map_err(|_| Failure::invalid(what, "1 to 2^32 − 1", size))
            });
            let shape = core::KvShape::new(layers?, kv_heads?, head_dim?, page_tokens?, dtype);
            shape.map(Self).map_err(Failure::from)
        })
    }

    #[getter]
    fn layers(&self) -> u32 {
        self.0.layers()
    }

    #[getter]
    fn kv_heads(&self) -> u32 {
        self.0.kv_heads()
    }

    #[getter]
    fn head_dim(&self) -> u32 {
        self.0.head_dim()
    }

    #[getter]
    fn page_tokens(&self) -> u32 {
        self.0.page_tokens()
    }

    /// "f32", "bf16", "f16" or "fp8_e4m3".
    #[getter]
    fn dtype(&self) -> &'static str {
        kv_dtype_name(self.0.dtype())
    }

    /// Bytes of a page: K [P, D] and V [P, D] of one KV head of one layer.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes()
    }

    /// Bytes that one token occupies in all layers and heads.
    #[getter]
    fn token_bytes(&self) -> u64 {
        self.0.token_bytes()
    }

    /// Blocks that `tokens` tokens occupy.
    fn blocks_for_tokens(&self, py: Python<'_>, tokens: Number) -> PyResult<u64> {
        let tokens = count("tokens", tokens).map_err(|failure| failure.raise(py))?;
        Ok(self.0.blocks_for_tokens(tokens as u64))
    }

    /// Pages of an arena that holds `blocks` blocks of every head group of a map at the same time,
    /// beside the null block; without a map all heads are one group.
    #[pyo3(signature = (blocks, heads = None))]
    fn pages_for_blocks(
        &self,
        py: Python<'_>,
        blocks: Number,
        heads: Option<&Bound<'_, HeadClassMap>>,
    ) -> PyResult<u64> {
        let heads = heads.map(|map| &map.get().0);
        call_core(py, || pages_for_blocks(&self.0, heads, blocks))
    }

    /// What pickles keep of it.
    fn __getnewargs__(&self) -> Sizes {
        (self.layers(), self.kv_heads(), self.head_dim(), self.page_tokens(), self.dtype())
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!(
            "KvShape(layers={}, kv_heads={}, head_dim={}, page_tokens={}, dtype={:?})",
            self.layers(),
            self.kv_heads(),
            self.head_dim(),
            self.page_tokens(),
            self.dtype()
        )
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

/// What each (layer, KV head) of a model keeps and reads, with the evidence for it.
#[pyclass(frozen, module = "kvweave._native")]
pub struct HeadClassMap(pub core::HeadClassMap);

#[pymethods]
impl HeadClassMap {
    /// Reads and validates the JSON form.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: Text<'_>) -> PyResult<Self> {
        call_core(py, || core::HeadClassMap::from_json(text.0)).map(Self)
    }

    /// The map in which every head keeps and reads everything: one head group.
    #[staticmethod]
    fn full(shape: &Bound<'_, KvShape>, model_fingerprint: Text<'_>) -> Self {
        Self(core::HeadClassMap::full(&shape.get().0, model_fingerprint.0))
    }

    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        call_core(py, || self.0.to_json())
    }

    /// A notebook shows the map as a picture.
    fn _repr_html_<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        drawn(slf.as_any(), "heads_html")
    }

    #[getter]
    fn layers(&self) -> u32 {
        self.0.layers
    }

    #[getter]
    fn kv_heads(&self) -> u32 {
        self.0.kv_heads
    }

    #[getter]
    fn model_fingerprint(&self) -> &str {
        &self.0.model_fingerprint
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((py.get_type::<Self>().getattr("from_json")?, (self.to_json(py)?,)))
    }

    fn __repr__(&self) -> String {
        format!(
            "HeadClassMap(layers={}, kv_heads={}, model_fingerprint={:?})",
            self.0.layers, self.0.kv_heads, self.0.model_fingerprint
        )
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

/// Pages of an arena that holds `blocks` blocks of every head group.
pub fn pages_for_blocks(
    shape: &core::KvShape,
    heads: Option<&core::HeadClassMap>,
    blocks: Number,
) -> Result<u64, Failure> {
    let config = CacheConfig { heads: heads.cloned(), ..CacheConfig::new(*shape, 0) };
    Ok(config.sized_for(count("blocks", blocks)? as u64)?.arena_pages)
}

/// What a group of heads is made of, in the order of its fields.
type GroupFields = (String, u32, u32, u32, u32, u32, String, bool);

/// The heads of one class, whose blocks come and go together.
#[pyclass(frozen, get_all, eq, hash, module = "kvweave._native")]
#[derive(PartialEq, Eq, Hash)]
pub struct HeadGroup {
    kind: String,
    /// Tokens at the start that are kept; 0 unless the kind is "window".
    sink: u32,
    /// Latest tokens that are kept; 0 unless the kind is "window".
    recent: u32,
    /// Pages of a block.
    pages: u32,
    /// Pages that a decode step reads; 0 unless the kind is "top_k".
    read: u32,
    /// Steps between two rankings of pages; 0 unless the kind is "top_k".
    rerank_every: u32,
    /// What pages are ranked by; "" unless the kind is "top_k".
    score: String,
    /// Whether pages that are not read are estimated by their means.
    estimate: bool,
}

impl HeadGroup {
    /// The groups of a cache, in order.
    pub fn all(groups: &core::HeadGroups) -> Vec<Self> {
        let group = |(group, &pages): (usize, &u32)| {
            let full = Self {
                kind: "full".to_owned(),
                sink: 0,
                recent: 0,
                pages,
                read: 0,
                rerank_every: 0,
                score: String::new(),
                estimate: false,
            };
            match groups.class(GroupId(group as u8)) {
                HeadClass::Full => full,
                HeadClass::Window { sink, recent } => {
                    Self { kind: "window".to_owned(), sink, recent, ..full }
                }
                HeadClass::TopK { pages: read, rerank_every, score, estimate } => Self {
                    kind: "top_k".to_owned(),
                    read,
                    rerank_every,
                    score: score.name().to_owned(),
                    estimate,
                    ..full
                },
            }
        };
        groups.pages().iter().enumerate().map(group).collect()
    }
}

#[pymethods]
impl HeadGroup {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "a field each")]
    fn new(
        kind: String,
        sink: u32,
        recent: u32,
        pages: u32,
        read: u32,
        rerank_every: u32,
        score: String,
        estimate: bool,
    ) -> Self {
        Self { kind, sink, recent, pages, read, rerank_every, score, estimate }
    }

    /// What pickles keep of it.
    fn __getnewargs__(&self) -> GroupFields {
        let Self { kind, sink, recent, pages, read, rerank_every, score, estimate } = self;
        let (kind, score) = (kind.clone(), score.clone());
        (kind, *sink, *recent, *pages, *read, *rerank_every, score, *estimate)
    }

    fn __repr__(&self) -> String {
        let Self { kind, sink, recent, pages, read, rerank_every, score, estimate } = self;
        let kept = format!("kind={kind:?}, sink={sink}, recent={recent}, pages={pages}");
        let ranked = format!("rerank_every={rerank_every}, score={score:?}, estimate={estimate}");
        format!("HeadGroup({kept}, read={read}, {ranked})")
    }
}
