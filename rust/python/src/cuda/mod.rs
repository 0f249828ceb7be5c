//! The ops on CUDA devices: tensors read and checked, tables that came from the host validated,
//! one launch a call.
//!
//! Every function follows the same steps: borrow the tensors, check them against each other, then
//! with the lock released find the device's kernels and launch. Nothing is waited for.

mod arguments;
mod attend;
mod copy_rerotate;
mod device;
mod merge_states;
mod reading;
mod score_tokens;
mod step_tables;
mod write_pages;

pub use attend::attend_cuda;
pub use copy_rerotate::copy_rerotate_cuda;
pub use device::{OnDevices, cuda_status};
pub use merge_states::merge_states_cuda;
pub use score_tokens::score_tokens_cuda;
pub use step_tables::step_tables_cuda;
pub use write_pages::write_pages_cuda;
