//! What the ops that read pages take from Python, wherever the pages lie.

use kvweave_core::ops::Scoring;
use pyo3::prelude::*;

use crate::arguments::count;
use crate::failure::Failure;
use crate::reach::Reach;
use crate::rope::RopeTable;
use crate::scalars::Number;

/// What all three ops take: `kvweave.ops.reading.Reading`, whose fields have these names.
#[derive(FromPyObject)]
pub struct AttentionArguments<'py> {
    pub q: Bound<'py, PyAny>,
    pub positions: Bound<'py, PyAny>,
    pub entries: Bound<'py, PyAny>,
    pub cache: Bound<'py, PyAny>,
    pub layer: Number,
    pub kv_heads: Number,
    pub scale: f32,
    pub rope: Py<RopeTable>,
    pub window: Option<Number>,
    pub softcap: Option<f32>,
    pub reach: Option<Py<Reach>>,
    pub kv_scales: Option<(f32, f32)>,
}

impl<'py> AttentionArguments<'py> {
    pub fn scoring(&self) -> Result<Scoring<'_>, Failure> {
        let window = self.window.as_ref().map(|window| keys("window", window)).transpose()?;
        let (scale, softcap, rope) = (self.scale, self.softcap, &self.rope.get().table);
        Ok(Scoring { scale, rope, window, softcap })
    }
}

/// The share [R, H] to write, and the window and sink of what is not edge.
pub type EdgeArguments<'py> = (Bound<'py, PyAny>, Number, Number);

/// A number of keys; more than positions can be is as good as all.
pub fn keys(what: &str, value: impl Into<Number>) -> Result<u32, Failure> {
    Ok(u32::try_from(count(what, value)?).unwrap_or(u32::MAX))
}
