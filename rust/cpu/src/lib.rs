//! The ops, fast on a CPU: rayon over requests, heads and row chunks, vectors within.
//!
//! Same names and params as `kvweave-reference`, which defines them. Attention works on tiles of
//! [`KEYS`](piece::KEYS) keys aligned to absolute positions and taken in order, and a row's numbers
//! never meet another row's: so the bits of a row depend neither on the other rows of the call nor
//! on the number of threads, and computing a prompt after a prefix hit changes none.

mod aligned;
mod attend_decode;
mod attend_in_basis;
mod attend_packed;
mod attend_prefill;
mod basis_numbers;
mod copy_rerotate;
mod disjoint;
mod estimate_pages;
mod grain;
mod merge_states;
mod moments;
mod move_fp8_pages;
mod move_pages;
mod pack_losses;
mod pack_pages;
mod packed_page;
mod piece;
mod planes_basis;
mod planes_page;
mod recycle_pages;
mod rotate_rows;
mod row_block;
mod row_chunk;
mod score_pages;
mod score_tokens;
mod select_pages;
mod simd;
mod symmetric_eigen;
mod tile;
mod top_r_page;
mod turn;
mod water_filling;
mod write_pages;

pub use attend_decode::attend_decode;
pub use attend_packed::attend_packed;
pub use attend_prefill::attend_prefill;
pub use copy_rerotate::copy_rerotate;
pub use estimate_pages::estimate_pages;
pub use merge_states::merge_states;
pub use moments::Moments;
pub use move_fp8_pages::move_fp8_pages;
pub use move_pages::move_pages;
pub use pack_losses::pack_losses;
pub use pack_pages::{pack_pages, unpack_pages};
pub use recycle_pages::recycle_pages;
pub use rotate_rows::rotate_rows;
pub use score_pages::score_pages;
pub use score_tokens::score_tokens;
pub use select_pages::select_pages;
pub use symmetric_eigen::NoEigenvectors;
pub use write_pages::write_pages;
