//! The compiled kernels, as `build.rs` left them.

/// Bytes on a boundary that the driver's loader accepts.
#[repr(C, align(64))]
struct Image<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The image of `csrc/<name>.cu`, where this build has it.
pub(crate) fn get(name: &str) -> Option<&'static [u8]> {
    ALL.iter().find(|(of, _)| *of == name).map(|(_, image)| &image.0)
}

/// Whether this build has kernels at all.
pub(crate) fn present() -> bool {
    !ALL.is_empty()
}
