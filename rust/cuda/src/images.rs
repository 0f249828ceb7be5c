//! The compiled kernels, as `build.rs` left them.

/// Bytes on a boundary that the driver's loader accepts.
#[repr(C, align(64))]
pub(crate) struct Image<T: ?Sized>(pub(crate) T);

include!(concat!(env!("OUT_DIR"), "/images.rs"));
