//! What is to move between the places where KV lies: plans, and no I/O.

mod plan;

pub use plan::{Place, Transfer, TransferPlan};
