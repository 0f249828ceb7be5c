//! `Shard` and `Provenance`: what a store gives back, and what a shard's KV is of.

use std::sync::Arc;

use kvweave_store as store;
use kvweave_store::{Dtype, Layout, Naming, ReadPath, ShardName, StoreError};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{count, raised};
use crate::dlpack::borrow;
use crate::failure::{Failure, call_core};
use crate::request::saturating_u32;
use crate::scalars::{Number, Regime, Text};
use crate::tokens::Tokens;

/// Everything but the tokens that K and V depend on.
#[pyclass(frozen, eq, module = "kvweave._native")]
#[derive(Clone, PartialEq)]
pub struct Provenance(pub store::Provenance);

#[pymethods]
impl Provenance {
    #[new]
    #[pyo3(signature = (
        model, *, dtype, layout, layers, kv_heads, head_dim, namespace=Text(""), regime=Regime(0),
        heads=Text("")
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn new(
        py: Python<'_>,
        model: Text<'_>,
        dtype: Text<'_>,
        layout: Text<'_>,
        layers: Number,
        kv_heads: Number,
        head_dim: Number,
        namespace: Text<'_>,
        regime: Regime,
        heads: Text<'_>,
    ) -> PyResult<Self> {
        let made = || {
            let made = store::Provenance {
                namespace: namespace.0.to_owned(),
                model: model.0.to_owned(),
                dtype: Dtype::of(dtype.0)?,
                regime: regime.0,
                heads: heads.0.to_owned(),
                layout: Layout {
                    kind: layout.0.to_owned(),
                    layers: saturating_u32("layers", layers)?,
                    kv_heads: saturating_u32("kv_heads", kv_heads)?,
                    head_dim: saturating_u32("head_dim", head_dim)?,
                },
            };
            made.check()?;
            Ok::<_, Failure>(Self(made))
        };
        raised(py, made())
    }

    #[getter]
    fn namespace(&self) -> &str {
        &self.0.namespace
    }

    #[getter]
    fn model(&self) -> &str {
        &self.0.model
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    #[getter]
    fn regime(&self) -> u64 {
        self.0.regime
    }

    #[getter]
    fn heads(&self) -> &str {
        &self.0.heads
    }

    #[getter]
    fn layout(&self) -> &str {
        &self.0.layout.kind
    }

    #[getter]
    fn layers(&self) -> u32 {
        self.0.layout.layers
    }

    #[getter]
    fn kv_heads(&self) -> u32 {
        self.0.layout.kv_heads
    }

    #[getter]
    fn head_dim(&self) -> u32 {
        self.0.layout.head_dim
    }

    /// Refuses the provenance of anything else: `ForeignShard` names the first field that differs.
    fn expect(&self, py: Python<'_>, found: &Self) -> PyResult<()> {
        raised(py, self.0.expect(&found.0).map_err(Failure::from))
    }

    /// The name of the shard of some tokens: a hash of them and all of this.
    #[pyo3(signature = (tokens, *, hash=Text("sha256")))]
    fn shard_name(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        hash: Text<'_>,
    ) -> PyResult<String> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        call_core(py, || {
            let naming = Naming::of(hash.0)?;
            Ok::<_, Failure>(self.0.name(naming, &ids).to_string())
        })
    }

    /// What pickles keep of it.
    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((&str,), Bound<'py, PyDict>)> {
        let named = PyDict::new(py);
        named.set_item("dtype", self.dtype())?;
        named.set_item("layout", self.layout())?;
        named.set_item("layers", self.layers())?;
        named.set_item("kv_heads", self.kv_heads())?;
        named.set_item("head_dim", self.head_dim())?;
        named.set_item("namespace", self.namespace())?;
        named.set_item("regime", self.regime())?;
        named.set_item("heads", self.heads())?;
        Ok(((self.model(),), named))
    }

    fn __repr__(&self) -> String {
        let Self(store::Provenance { namespace, model, dtype, .. }) = self;
        format!("Provenance(model={model:?}, dtype={:?}, namespace={namespace:?})", dtype.name())
    }
}

/// A shard that is open for reading; it stays readable when it is evicted meanwhile.
#[pyclass(frozen, module = "kvweave._native")]
pub struct Shard {
    store: Arc<store::Store>,
    name: ShardName,
    shard: store::Shard,
}

impl Shard {
    pub fn new(store: &Arc<store::Store>, name: ShardName, shard: store::Shard) -> Self {
        Self { store: Arc::clone(store), name, shard }
    }

    /// That a part is spoiled is noted, so that the next who computes the KV replaces it.
    fn noted<T>(&self, read: Result<T, StoreError>) -> Result<T, Failure> {
        if let Err(error) = &read
            && error.is_damage()
        {
            self.store.note_damage(&self.name, error);
        }
        read.map_err(Failure::from)
    }
}

#[pymethods]
impl Shard {
    #[getter]
    fn name(&self) -> &str {
        self.name.as_str()
    }

    #[getter]
    fn provenance(&self) -> Provenance {
        Provenance(self.shard.header().provenance.clone())
    }

    /// Milliseconds since 1970 from which on it is nobody's hit.
    #[getter]
    fn expires(&self) -> Option<u64> {
        self.shard.header().expires
    }

    /// Bytes of its file.
    #[getter]
    fn file_bytes(&self) -> u64 {
        self.shard.file_bytes()
    }

    /// Bytes of each part, the token ids first.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let sizes = PyDict::new(py);
        for part in &self.shard.header().parts {
            sizes.set_item(&part.name, part.bytes)?;
        }
        Ok(sizes)
    }

    /// The token ids, u32 [T].
    fn tokens<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let tokens = call_core(py, || self.noted(self.shard.tokens()))?;
        Ok(PyArray1::from_vec(py, tokens))
    }

    /// A part as bytes.
    fn read<'py>(&self, py: Python<'py>, part: Text<'_>) -> PyResult<Bound<'py, PyBytes>> {
        let found = self.shard.part(part.0).map_err(Failure::from);
        let length = raised(py, found)?.bytes as usize;
        PyBytes::new_with(py, length, |out| {
            call_core(py, || self.noted(self.shard.read(part.0, out))).map(drop)
        })
    }

    /// A part into a contiguous tensor of its size on the host; how it came.
    fn read_into(
        &self,
        py: Python<'_>,
        part: Text<'_>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<&'static str> {
        let borrowed = borrow("out", out)?;
        // SAFETY: the owner is held by `borrowed`; writers are excluded as `arguments` says. The
        // bytes are those of a tensor of this dtype that was stored, or of whatever else it is: any
        // bits are a value of every dtype that `borrow` lets in.
        let memory = raised(py, unsafe { borrowed.tensor.bytes_mut("out") })?;
        call_core(py, || self.noted(self.shard.read(part.0, memory))).map(ReadPath::name)
    }

    /// Bytes of a part from `begin` on into a contiguous tensor on the host; the hashes of its
    /// chunks of 1 MiB, for `check`.
    fn read_some(
        &self,
        py: Python<'_>,
        part: Text<'_>,
        begin: Number,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<u64>> {
        let from = raised(py, count("begin", begin))? as u64;
        let borrowed = borrow("out", out)?;
        // SAFETY: as for `read_into`.
        let memory = raised(py, unsafe { borrowed.tensor.bytes_mut("out") })?;
        call_core(py, || self.noted(self.shard.read_some(part.0, from, memory)))
    }

    /// Holds a part to its checksum, by the hashes of all its chunks.
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn check(&self, py: Python<'_>, part: Text<'_>, hashes: Vec<u64>) -> PyResult<()> {
        raised(py, self.noted(self.shard.check(part.0, &hashes)))
    }

    fn __repr__(&self) -> String {
        let header = self.shard.header();
        let bytes = self.shard.file_bytes();
        format!("Shard({:?}, tokens={}, file_bytes={bytes})", self.name.as_str(), header.tokens)
    }
}
