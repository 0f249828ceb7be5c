//! What each (layer, KV head) keeps and reads, and the groups of equal retention.
//!
//! A head's class is fixed per model before anything is served, so heads of one class grow and
//! shrink together and one small block table per group is enough.

mod classes;
mod groups;
mod refusal;
mod sample;

pub use classes::{
    HeadClass, HeadClassMap, HeadEntry, MeasuredReach, RankedBy, SCHEMA_VERSION, Stability,
};
pub use groups::{HeadGroups, LocalWindow};
pub use sample::{SampledDtype, WeightSample};
