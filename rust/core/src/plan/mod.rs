//! Plans as data: what is reused and why not, and the flat arrays that say where everything lies.

mod block_table;
mod reuse;

pub(crate) use block_table::{BlockTable, DonorRange, Listed, donors_in};
pub use reuse::{Outcome, PlanSpan, ReusePlan, SegmentSource};
