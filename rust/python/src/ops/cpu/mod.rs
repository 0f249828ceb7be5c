//! The ops on the host: memory viewed as slices, the fast crate or the definition.

pub mod attend_decode;
pub mod attend_packed;
pub mod attend_prefill;
pub mod copy_rerotate;
mod element;
pub mod estimate_pages;
pub mod gather_entries;
pub mod merge_states;
pub mod moments;
pub mod move_fp8_pages;
pub mod move_pages;
pub mod pack_losses;
pub mod pack_pages;
mod reading;
pub mod recycle_pages;
pub mod rotate_rows;
pub mod score_pages;
pub mod score_tokens;
pub mod select_pages;
pub mod step_tables;
pub mod write_pages;
