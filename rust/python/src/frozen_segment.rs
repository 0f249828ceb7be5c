//! `FrozenSegment` as Python sees it.

use kvweave_core as core;
use pyo3::prelude::*;

/// What of an entry its pickle holds, in the order of its fields.
type EntryFields = (String, String, usize, usize, usize, u64);

/// A knowledge-base entry, as it was when it was asked for.
#[pyclass(frozen, get_all, eq, hash, module = "kvweave._native")]
#[derive(PartialEq, Eq, Hash)]
pub struct FrozenSegment {
    name: String,
    namespace: String,
    tokens: usize,
    blocks: usize,
    resident_blocks: usize,
    references: u64,
}

#[pymethods]
impl FrozenSegment {
    #[new]
    fn new(
        name: String,
        namespace: String,
        tokens: usize,
        blocks: usize,
        resident_blocks: usize,
        references: u64,
    ) -> Self {
        Self { name, namespace, tokens, blocks, resident_blocks, references }
    }

    /// What pickles keep of it.
    fn __getnewargs__(&self) -> EntryFields {
        let Self { name, namespace, tokens, blocks, resident_blocks, references } = self;
        (name.clone(), namespace.clone(), *tokens, *blocks, *resident_blocks, *references)
    }

    fn __repr__(&self) -> String {
        format!(
            "FrozenSegment(name={:?}, namespace={:?}, tokens={}, blocks={}, resident_blocks={})",
            self.name, self.namespace, self.tokens, self.blocks, self.resident_blocks
        )
    }
}

impl From<core::FrozenSegment> for FrozenSegment {
    fn from(segment: core::FrozenSegment) -> Self {
        let core::FrozenSegment { name, namespace, tokens, blocks, resident_blocks, references } =
            segment;
        Self { name, namespace, tokens, blocks, resident_blocks, references }
    }
}
