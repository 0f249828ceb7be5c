//! The ops: a folder for where the tensors lie, in it a file for each op, of the op's own name.
//!
//! Every function follows the same steps: borrow the tensors, check what the params struct cannot,
//! run with the lock released. Shapes are named as in `kvweave.ops`.

mod bounded_pages;
pub mod cpu;
pub mod cuda;
mod page_means;
mod reading;
mod rotation;
mod row_pages;
mod step_batch;
