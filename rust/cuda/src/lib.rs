//! The ops on a CUDA stream: module loading, params, launches.
//!
//! The driver is looked for at run time, so the same build imports on machines without one. Every
//! call into it stands in `ffi.rs`. Launches never wait for the device and can be captured in a
//! CUDA graph.

mod backend;
mod copy_rerotate;
mod error;
mod ffi;
mod images;
mod params;

pub use backend::{CudaBackend, status};
pub use copy_rerotate::{CopyRerotateLaunch, DeviceTensor};
pub use error::{CudaError, Unavailable};
pub use ffi::DeviceBuffer;
