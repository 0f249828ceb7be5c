//! The ops on CUDA devices: tensors read and checked, tables that came from the host validated,
//! one launch a call.
//!
//! Every function follows the same steps: borrow the tensors, check them against each other, then
//! with the lock released find the device's kernels and launch. Nothing is waited for.

pub mod arguments;
mod attend;
pub mod attend_decode;
pub mod attend_packed;
pub mod attend_prefill;
mod bases;
pub mod copy_rerotate;
pub mod device;
pub mod estimate_pages;
pub mod gather_entries;
pub mod merge_states;
pub mod move_fp8_pages;
pub mod move_pages;
pub mod pack_pages;
mod reading;
pub mod recycle_pages;
pub mod recycle_seats;
pub mod rotate_rows;
pub mod score_pages;
pub mod score_tokens;
pub mod select_pages;
pub mod step_tables;
mod workspace;
pub mod write_pages;
