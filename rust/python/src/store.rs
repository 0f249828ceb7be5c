//! `Store`: shards on disk as Python sees them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvweave_store as store;
use kvweave_store::{
    Budget, Listed, Lru, Naming, Part, ShardName, StoreError, StoreOptions, Terms, Victims,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{count, raised};
use crate::dlpack::{Borrowed, borrow};
use crate::failure::{Failure, call_core};
use crate::scalars::{Number, Text};
use crate::shard::{Provenance, Shard};
use crate::store_order::CostAware;
use crate::tokens::Tokens;

/// One line of what a store holds.
#[pyclass(frozen, get_all, eq, module = "kvweave._native")]
#[derive(Clone, PartialEq)]
pub struct StoredShard {
    name: String,
    provenance: Option<Provenance>,
    tokens: Option<u64>,
    expires: Option<u64>,
    cost: Option<u64>,
    file_bytes: u64,
    used: u64,
    documents: usize,
    error: Option<String>,
}

impl From<Listed> for StoredShard {
    fn from(listed: Listed) -> Self {
        let Listed { name, header, bytes, used, documents } = listed;
        let error = header.as_ref().err().map(ToString::to_string);
        let header = header.ok();
        Self {
            name: name.to_string(),
            provenance: header.as_ref().map(|header| Provenance(header.provenance.clone())),
            tokens: header.as_ref().map(|header| header.tokens),
            cost: header.as_ref().and_then(|header| header.cost),
            expires: header.and_then(|header| header.expires),
            file_bytes: bytes,
            used,
            documents,
            error,
        }
    }
}

/// What a line of a store is made of, in the order of its fields.
type LineFields = (
    String,
    Option<Provenance>,
    Option<u64>,
    Option<u64>,
    Option<u64>,
    u64,
    u64,
    usize,
    Option<String>,
);

#[pymethods]
impl StoredShard {
    #[new]
    #[pyo3(signature = (
        name, provenance, tokens, expires, cost, file_bytes, used, documents, error
    ))]
    #[expect(clippy::too_many_arguments, reason = "a field each")]
    fn new(
        name: String,
        provenance: Option<Bound<'_, Provenance>>,
        tokens: Option<u64>,
        expires: Option<u64>,
        cost: Option<u64>,
        file_bytes: u64,
        used: u64,
        documents: usize,
        error: Option<String>,
    ) -> Self {
        let provenance = provenance.map(|provenance| provenance.get().clone());
        Self { name, provenance, tokens, expires, cost, file_bytes, used, documents, error }
    }

    /// What pickles keep of it.
    fn __getnewargs__(&self) -> LineFields {
        let Self { name, provenance, tokens, expires, cost, file_bytes, used, documents, error } =
            self.clone();
        (name, provenance, tokens, expires, cost, file_bytes, used, documents, error)
    }

    fn __repr__(&self) -> String {
        let Self { name, file_bytes, documents, .. } = self;
        let said = match (&self.error, &self.provenance) {
            (Some(error), _) => format!("error={error:?}"),
            (None, of) => {
                let namespace = of.as_ref().map_or("", |of| &of.0.namespace);
                format!("tokens={}, namespace={namespace:?}", self.tokens.unwrap_or(0))
            }
        };
        format!("StoredShard({name:?}, {said}, file_bytes={file_bytes}, documents={documents})")
    }
}

/// A folder of shards.
#[pyclass(frozen, module = "kvweave._native")]
pub struct Store(Arc<store::Store>);

/// Bytes of a part, held while they are written.
pub enum Held<'py> {
    Bytes(Bound<'py, PyBytes>),
    Tensor(Borrowed<'py>),
}

impl Held<'_> {
    pub fn bytes(&self) -> Result<&[u8], Failure> {
        match self {
            Held::Bytes(bytes) => Ok(bytes.as_bytes()),
            // SAFETY: the owner is held by self; writers are excluded as `arguments` says.
            Held::Tensor(borrowed) => unsafe { borrowed.tensor.bytes("part") },
        }
    }
}

pub fn held<'py>(parts: &Bound<'py, PyDict>) -> PyResult<Vec<(String, Held<'py>)>> {
    let mut all = Vec::with_capacity(parts.len());
    for (name, value) in parts {
        let name = name.extract::<Text<'_>>()?.0.to_owned();
        let bytes = match value.cast_into::<PyBytes>() {
            Ok(bytes) => Held::Bytes(bytes),
            Err(error) => Held::Tensor(borrow("part", &error.into_inner())?),
        };
        all.push((name, bytes));
    }
    Ok(all)
}

/// Milliseconds since 1970: as given, or by the clock.
pub fn time(now: Option<Number>) -> Result<u64, Failure> {
    let Some(now) = now else {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        return Ok(since.map_or(0, |since| since.as_millis() as u64));
    };
    Ok(count("now", now)? as u64)
}

pub fn size(what: &str, bytes: Option<Number>) -> Result<Option<u64>, Failure> {
    bytes.map(|bytes| Ok(count(what, bytes)? as u64)).transpose()
}

fn victims(eviction: &str) -> Result<Box<dyn Victims>, Failure> {
    match eviction {
        "lru" => Ok(Box::new(Lru)),
        "cost-aware" => Ok(Box::new(CostAware::new()?)),
        other => Err(Failure::invalid("eviction", "lru or cost-aware", format!("{other:?}"))),
    }
}

fn named(name: Text<'_>) -> Result<ShardName, Failure> {
    Ok(ShardName::parse(name.0)?)
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (
        path, *, hash=None, create=true, capacity_bytes=None, quota_bytes=None, direct=true,
        threads=Number::from(4), eviction=Text("lru"), model=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        hash: Option<Text<'_>>,
        create: bool,
        capacity_bytes: Option<Number>,
        quota_bytes: Option<Number>,
        direct: bool,
        threads: Number,
        eviction: Text<'_>,
        model: Option<Text<'_>>,
    ) -> PyResult<Self> {
        let opened = call_core(py, || {
            let options = StoreOptions {
                naming: hash.map(|hash| Naming::of(hash.0)).transpose()?,
                create,
                model: model.map(|model| model.0.to_owned()),
                budget: Budget {
                    capacity: size("capacity_bytes", capacity_bytes)?,
                    quota: size("quota_bytes", quota_bytes)?,
                    ..Budget::default()
                },
                direct,
                threads: count("threads", threads)?.clamp(1, 64),
                victims: victims(eviction.0)?,
            };
            Ok::<_, Failure>(store::Store::open(&path, options)?)
        })?;
        Ok(Self(Arc::new(opened)))
    }

    /// How names are made: "xxh3-128" or "sha256".
    #[getter]
    fn hash(&self) -> &'static str {
        self.0.naming().name()
    }

    /// The model that the folder belonged to when it was opened; None: nobody's.
    #[getter]
    fn model(&self) -> Option<&str> {
        self.0.model()
    }

    fn __repr__(&self) -> String {
        format!("Store({:?}, hash={:?})", self.0.root(), self.hash())
    }

    #[pyo3(signature = (namespace=Text(""), *, bytes=None))]
    fn set_quota(
        &self,
        py: Python<'_>,
        namespace: Text<'_>,
        bytes: Option<Number>,
    ) -> PyResult<()> {
        call_core(py, || Ok::<_, Failure>(self.0.set_quota(namespace.0, size("bytes", bytes)?)?))
    }

    #[pyo3(signature = (provenance, tokens, parts, *, expires=None, cost=None, now=None))]
    #[expect(clippy::too_many_arguments, reason = "each is a keyword argument in Python")]
    fn put(
        &self,
        py: Python<'_>,
        provenance: &Provenance,
        tokens: &Bound<'_, PyAny>,
        parts: &Bound<'_, PyDict>,
        expires: Option<Number>,
        cost: Option<Number>,
        now: Option<Number>,
    ) -> PyResult<(String, bool)> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        let held = held(parts)?;
        let parts: Result<Vec<Part<'_>>, Failure> =
            held.iter().map(|(name, held)| Ok(Part { name, bytes: held.bytes()? })).collect();
        let parts = raised(py, parts)?;
        let stored = call_core(py, || {
            let terms = Terms { expires: size("expires", expires)?, cost: size("cost", cost)? };
            Ok::<_, Failure>(self.0.put(&provenance.0, &ids, &parts, terms, time(now)?)?)
        })?;
        Ok((stored.name.to_string(), stored.written))
    }

    /// Whether a shard of `tokens` ids and parts of these sizes has room beside what is there.
    #[pyo3(signature = (provenance, tokens, parts, *, expires=None, cost=None))]
    fn has_room(
        &self,
        py: Python<'_>,
        provenance: &Provenance,
        tokens: Number,
        parts: &Bound<'_, PyDict>,
        expires: Option<Number>,
        cost: Option<Number>,
    ) -> PyResult<bool> {
        let mut sizes = Vec::with_capacity(parts.len());
        for (name, bytes) in parts {
            let name = name.extract::<Text<'_>>()?.0.to_owned();
            sizes.push((name, raised(py, count("part", bytes.extract::<Number>()?))? as u64));
        }
        call_core(py, || {
            let terms = Terms { expires: size("expires", expires)?, cost: size("cost", cost)? };
            let sizes: Vec<(&str, u64)> = sizes.iter().map(|(name, of)| (&**name, *of)).collect();
            let tokens = count("tokens", tokens)? as u64;
            Ok::<_, Failure>(self.0.has_room(&provenance.0, tokens, &sizes, terms)?)
        })
    }

    #[pyo3(signature = (provenance, tokens, *, now=None))]
    fn get(
        &self,
        py: Python<'_>,
        provenance: &Provenance,
        tokens: &Bound<'_, PyAny>,
        now: Option<Number>,
    ) -> PyResult<Option<Shard>> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        call_core(py, || {
            let found = self.0.get(&provenance.0, &ids, time(now)?)?;
            let name = provenance.0.name(self.0.naming(), &ids);
            Ok::<_, Failure>(found.map(|shard| Shard::new(&self.0, name, shard)))
        })
    }

    #[pyo3(signature = (provenance, tokens, *, now=None))]
    fn contains(
        &self,
        py: Python<'_>,
        provenance: &Provenance,
        tokens: &Bound<'_, PyAny>,
        now: Option<Number>,
    ) -> PyResult<bool> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        call_core(py, || Ok::<_, Failure>(self.0.contains(&provenance.0, &ids, time(now)?)?))
    }

    /// The shard of a name; `UnknownShard` where there is none.
    fn shard(&self, py: Python<'_>, name: Text<'_>) -> PyResult<Shard> {
        call_core(py, || {
            let name = named(name)?;
            let found =
                self.0.open_shard(&name)?.ok_or_else(|| StoreError::unknown(name.as_str()))?;
            Ok::<_, Failure>(Shard::new(&self.0, name, found))
        })
    }

    fn delete(&self, py: Python<'_>, name: Text<'_>) -> PyResult<bool> {
        call_core(py, || Ok::<_, Failure>(self.0.delete(&named(name)?)?))
    }

    #[pyo3(signature = (namespace=None))]
    fn list(&self, py: Python<'_>, namespace: Option<Text<'_>>) -> PyResult<Vec<StoredShard>> {
        let listed = call_core(py, || self.0.list(namespace.map(|name| name.0)))?;
        Ok(listed.into_iter().map(StoredShard::from).collect())
    }

    /// Bytes of all files, and of those of each namespace.
    fn held<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyDict>)> {
        let (total, held) = call_core(py, || self.0.held())?;
        let namespaces = PyDict::new(py);
        for (namespace, bytes) in held {
            namespaces.set_item(namespace, bytes)?;
        }
        Ok((total, namespaces))
    }

    fn name(
        &self,
        py: Python<'_>,
        namespace: Text<'_>,
        name: Text<'_>,
        shard: Text<'_>,
    ) -> PyResult<()> {
        call_core(py, || Ok::<_, Failure>(self.0.name(namespace.0, name.0, &named(shard)?)?))
    }

    #[pyo3(signature = (name, namespace=Text(""), *, now=None))]
    fn document(
        &self,
        py: Python<'_>,
        name: Text<'_>,
        namespace: Text<'_>,
        now: Option<Number>,
    ) -> PyResult<Option<Shard>> {
        call_core(py, || {
            let found = self.0.document(namespace.0, name.0, time(now)?)?;
            Ok::<_, Failure>(found.map(|(name, shard)| Shard::new(&self.0, name, shard)))
        })
    }

    #[pyo3(signature = (name, namespace=Text("")))]
    fn forget(&self, py: Python<'_>, name: Text<'_>, namespace: Text<'_>) -> PyResult<bool> {
        call_core(py, || self.0.forget(namespace.0, name.0))
    }

    /// (namespace, name, shard) of each document, sorted.
    #[pyo3(signature = (namespace=None))]
    fn documents(
        &self,
        py: Python<'_>,
        namespace: Option<Text<'_>>,
    ) -> PyResult<Vec<(String, String, String)>> {
        let documents = call_core(py, || self.0.documents(namespace.map(|name| name.0)))?;
        let listed = documents.into_iter();
        Ok(listed.map(|d| (d.namespace, d.name, d.shard.to_string())).collect())
    }

    #[pyo3(signature = (*, now=None))]
    fn collect<'py>(&self, py: Python<'py>, now: Option<Number>) -> PyResult<Bound<'py, PyDict>> {
        let found = call_core(py, || Ok::<_, Failure>(self.0.collect(time(now)?)?))?;
        let counts = PyDict::new(py);
        counts.set_item("leftovers", found.leftovers)?;
        counts.set_item("expired", found.expired)?;
        counts.set_item("spoiled", found.spoiled)?;
        counts.set_item("bytes", found.bytes)?;
        Ok(counts)
    }

    fn verify(&self, py: Python<'_>, name: Text<'_>) -> PyResult<()> {
        call_core(py, || Ok::<_, Failure>(self.0.verify(&named(name)?)?))
    }

    /// (file, why) of each document's record that names nothing.
    fn verify_documents(&self, py: Python<'_>) -> PyResult<Vec<(String, String)>> {
        let wrong = call_core(py, || self.0.verify_documents())?;
        Ok(wrong.into_iter().map(|(file, error)| (file, error.to_string())).collect())
    }

    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn export_shard(&self, py: Python<'_>, name: Text<'_>, path: PathBuf) -> PyResult<()> {
        call_core(py, || Ok::<_, Failure>(self.0.export(&named(name)?, &path)?))
    }

    #[pyo3(signature = (path, *, now=None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted for this call alone")]
    fn import_shard(
        &self,
        py: Python<'_>,
        path: PathBuf,
        now: Option<Number>,
    ) -> PyResult<(String, bool)> {
        let stored = call_core(py, || Ok::<_, Failure>(self.0.import(&path, time(now)?)?))?;
        Ok((stored.name.to_string(), stored.written))
    }
}
