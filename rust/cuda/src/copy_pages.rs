//! Pages that a device's copy engine carries: `move_pages` where the host knows the moves.

use kvweave_core::ops::PageSpan;

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{CopiedRows, copy_rows, memory_around};
use crate::operands::DeviceTensor;
use crate::pinned_parts::{HostSide, PinnedParts};

/// An arena of pages that are copied from or to.
#[derive(Clone, Copy, Debug)]
pub struct CopiedArena {
    /// Its bytes.
    pub data: DeviceTensor,
    /// Whether they lie on the host; then what is copied has to be pinned, at once or in parts.
    pub on_host: bool,
}

/// Copies of pages, one behind the other; `kvweave_core::ops::Moves` checked where they lie.
#[derive(Clone, Copy, Debug)]
pub struct CopyPagesLaunch<'a> {
    /// The arena that is read.
    pub source: CopiedArena,
    /// The arena that is written.
    pub target: CopiedArena,
    /// What is copied.
    pub spans: &'a [PageSpan],
    /// Bytes of a page.
    pub page_bytes: usize,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the copies on the stream. Nothing is waited for, no memory of the device taken.
    ///
    /// # Safety
    /// All spans lie within both arenas, which lie on this device or on the host where it says so
    /// and stay valid until the stream has passed; `stream` is a stream of this device, and no page
    /// is written twice.
    ///
    /// # Errors
    /// `InvalidArgument` for host memory that is not pinned, `Driver` when the driver refuses.
    pub unsafe fn copy_pages(&self, call: &CopyPagesLaunch<'_>) -> Result<(), CudaError> {
        let CopyPagesLaunch { source, target, page_bytes: page, .. } = *call;
        let mut parts = PinnedParts::new(|address| memory_around(&self.context, address));
        let mut copies = Vec::with_capacity(call.spans.len());
        for span in call.spans {
            let rows = CopiedRows {
                source: source.data.address + (span.from * page) as u64,
                target: target.data.address + (span.to * page) as u64,
                width: span.pages * page,
                rows: span.rows,
                source_pitch: span.from_step * page,
                target_pitch: span.to_step * page,
            };
            let (what, side) = match (source.on_host, target.on_host) {
                (true, _) => ("source", HostSide::Source),
                (_, true) => ("target", HostSide::Target),
                _ => {
                    copies.push(rows);
                    continue;
                }
            };
            parts.cut(rows, side, &mut copies).ok_or_else(|| {
                let expected = "pages on a CUDA device or in pinned memory";
                CudaError::invalid(what, expected, "pageable ones")
            })?;
        }
        // SAFETY: spans and arenas are the caller's promise; memory of the host is pinned.
        unsafe { copy_rows(&self.context, copies.into_iter(), call.stream) }
    }
}
