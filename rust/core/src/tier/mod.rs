//! What is to move between pages: plans, and no I/O.

mod plan;

pub use plan::{Transfer, TransferPlan};
