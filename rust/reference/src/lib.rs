//! The definition of every op: plain loops, f64 accumulation, one rounding at the end.
//!
//! Nothing here is fast on purpose. Every backend is checked against these functions; these are
//! checked against index arithmetic and closed forms by their own tests.
#![forbid(unsafe_code)]

mod attend_decode;
mod attend_packed;
mod attend_prefill;
mod attention;
mod basis_numbers;
mod copy_rerotate;
mod estimate_pages;
mod gather_entries;
mod merge_states;
mod move_fp8_pages;
mod move_pages;
mod pack_losses;
mod pack_pages;
mod planes;
mod recycle_pages;
mod rotate;
mod rotate_rows;
mod score_pages;
mod score_tokens;
mod select_pages;
mod step_tables;
mod top_r;
mod write_pages;

pub use attend_decode::attend_decode;
pub use attend_packed::attend_packed;
pub use attend_prefill::attend_prefill;
pub use copy_rerotate::copy_rerotate;
pub use estimate_pages::estimate_pages;
pub use gather_entries::gather_entries;
pub use merge_states::merge_states;
pub use move_fp8_pages::move_fp8_pages;
pub use move_pages::move_pages;
pub use pack_losses::pack_losses;
pub use pack_pages::{pack_pages, unpack_pages};
pub use recycle_pages::recycle_pages;
pub use rotate_rows::rotate_rows;
pub use score_pages::score_pages;
pub use score_tokens::score_tokens;
pub use select_pages::select_pages;
pub use step_tables::step_tables;
pub use write_pages::write_pages;
