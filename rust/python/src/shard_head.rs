//! `ShardHead`: the head of a shard's file that lies where no file system is, to write or to check.

use kvweave_store as store;
use kvweave_store::{ALIGN, Part, PartEntry, ShardHeader, StoreError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arguments::{count, raised};
use crate::dlpack::borrow;
use crate::failure::{Failure, call_core};
use crate::scalars::{Number, Text};
use crate::shard::Provenance;
use crate::store::{Held, held, size};
use crate::tokens::Tokens;

/// The head of a shard's file: what it is of, its parts, and where each lies.
#[pyclass(frozen, module = "kvweave._native")]
pub struct ShardHead(ShardHeader);

impl ShardHead {
    fn placed(&self, name: &str) -> Result<(u64, &PartEntry), StoreError> {
        self.0.part(name).ok_or_else(|| StoreError::unknown(name))
    }
}

#[pymethods]
impl ShardHead {
    /// Of the shard of some tokens and parts, to be written.
    #[new]
    #[pyo3(signature = (provenance, tokens, parts, *, expires=None))]
    fn new(
        py: Python<'_>,
        provenance: &Provenance,
        tokens: &Bound<'_, PyAny>,
        parts: &Bound<'_, PyDict>,
        expires: Option<Number>,
    ) -> PyResult<Self> {
        let tokens = Tokens::of(tokens)?;
        let ids = raised(py, tokens.ids())?;
        let held = held(parts)?;
        let parts: Result<Vec<Part<'_>>, Failure> =
            held.iter().map(|(name, held)| Ok(Part { name, bytes: held.bytes()? })).collect();
        let parts = raised(py, parts)?;
        call_core(py, || {
            let expires = size("expires", expires)?;
            Ok::<_, Failure>(Self(ShardHeader::of(&provenance.0, &ids, &parts, expires.into())?))
        })
    }

    /// Bytes of the head of a file of `file_bytes`, from the first bytes of it.
    #[staticmethod]
    fn length(py: Python<'_>, head: &Bound<'_, PyBytes>, file_bytes: Number) -> PyResult<usize> {
        let found = count("file_bytes", file_bytes).and_then(|length| {
            Ok::<_, Failure>(ShardHeader::head_bytes(head.as_bytes(), length as u64)?)
        });
        raised(py, found)
    }

    /// The head of a file of `file_bytes`, of any origin.
    #[staticmethod]
    fn parse(py: Python<'_>, head: &Bound<'_, PyBytes>, file_bytes: Number) -> PyResult<Self> {
        let found = count("file_bytes", file_bytes).and_then(|length| {
            Ok::<_, Failure>(Self(ShardHeader::of_head(head.as_bytes(), length as u64)?))
        });
        raised(py, found)
    }

    #[getter]
    fn provenance(&self) -> Provenance {
        Provenance(self.0.provenance.clone())
    }

    /// T.
    #[getter]
    fn tokens(&self) -> u64 {
        self.0.tokens
    }

    /// Milliseconds since 1970 from which on it is nobody's hit.
    #[getter]
    fn expires(&self) -> Option<u64> {
        self.0.expires
    }

    /// Bytes of the whole file.
    #[getter]
    fn file_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        raised(py, self.0.file_bytes().map_err(Failure::from))
    }

    /// (begin, bytes with the zeros behind, bytes) of each part by name, the token ids first.
    #[getter]
    fn places<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let places = PyDict::new(py);
        for (begin, part) in self.0.placed() {
            let held = part.bytes.next_multiple_of(ALIGN);
            places.set_item(&part.name, (begin, held, part.bytes))?;
        }
        Ok(places)
    }

    /// The head as it stands in the file, zeros behind it included.
    fn encode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let head = raised(py, self.0.encode().map_err(Failure::from))?;
        Ok(PyBytes::new(py, &head))
    }

    /// Refuses memory that is not a part's bytes and the zeros behind.
    fn check(&self, py: Python<'_>, part: Text<'_>, memory: &Bound<'_, PyAny>) -> PyResult<()> {
        let (_, entry) = raised(py, self.placed(part.0).map_err(Failure::from))?;
        let held = match memory.clone().cast_into::<PyBytes>() {
            Ok(bytes) => Held::Bytes(bytes),
            Err(error) => Held::Tensor(borrow("memory", &error.into_inner())?),
        };
        let bytes = raised(py, held.bytes())?;
        call_core(py, || entry.check(bytes).map_err(Failure::from))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn __repr__(&self) -> String {
        let store::ShardHeader { tokens, parts, .. } = &self.0;
        format!("ShardHead(tokens={tokens}, parts={})", parts.len())
    }
}
