//! The ops on a CUDA stream: module loading, params, launches.
//!
//! The driver is looked for at run time, so the same build imports on machines without one. Every
//! call into it stands in `ffi.rs`. Launches never wait for the device and can be captured in a
//! CUDA graph.

mod attend;
mod attend_call;
mod attend_decode;
mod attend_packed;
mod attend_plan;
mod attend_prefill;
mod backend;
mod background;
mod bases;
mod bounds;
mod choice_params;
mod copy_pages;
mod copy_rerotate;
mod error;
mod estimate_pages;
mod ffi;
mod gather_entries;
mod images;
mod kernels;
mod merge_states;
mod move_fp8_pages;
mod move_pages;
mod move_params;
mod operands;
mod pack_pages;
mod paged;
mod params;
mod per_device;
mod pinned_parts;
mod recycle_pages;
mod rotate_rows;
mod rounds;
mod score_pages;
mod score_tokens;
mod select_pages;
mod step_tables;
mod tensor_map;
mod tiled_pages;
mod write_pages;

pub use attend_call::{AttendLaunch, AttendWorkspace};
pub use attend_packed::PackedPlan;
pub use attend_plan::AttendPlan;
pub use backend::{CudaBackend, status};
pub use bases::DeviceBases;
pub use bounds::BoundNumbers;
pub use copy_pages::{CopiedArena, CopyPagesLaunch};
pub use copy_rerotate::CopyRerotateLaunch;
pub use error::{CudaError, Unavailable};
pub use estimate_pages::{EstimatePagesLaunch, EstimatePlan};
pub use ffi::{DeviceBuffer, Number};
pub use gather_entries::{GatherEntriesLaunch, KeptPages};
pub use merge_states::MergeStatesLaunch;
pub use move_fp8_pages::MoveFp8PagesLaunch;
pub use move_pages::{DeviceRowPages, MovePagesLaunch};
pub use operands::{DeviceRows, DeviceTensor, Tiled};
pub use pack_pages::{PackDirection, PackPagesLaunch};
pub use paged::{DeviceKv, DeviceReach};
pub use per_device::PerDevice;
pub use recycle_pages::{RecyclePagesLaunch, RecyclePlan, SeatedRows};
pub use rotate_rows::{RotateRowsLaunch, RotatedVectors};
pub use score_pages::ScorePagesLaunch;
pub use score_tokens::{EdgeLaunch, ScorePlan, ScoreTokensLaunch};
pub use select_pages::SelectPagesLaunch;
pub use step_tables::StepTablesLaunch;
pub use tensor_map::TensorMap;
pub use write_pages::{BoundsLaunch, WritePagesLaunch};
