//! Pages that a device's copy engine carries: `move_pages` where the host knows the moves.

use kvweave_core::ops::PageSpan;

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{CopiedRows, copy_rows, reachable};
use crate::operands::DeviceTensor;

/// An arena of pages that are copied from or to.
#[derive(Clone, Copy, Debug)]
pub struct CopiedArena {
    /// Its bytes.
    pub data: DeviceTensor,
    /// Whether they lie on the host; then they have to be pinned.
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
    /// Puts the copies on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// All spans lie within both arenas, which lie on this device or on the host where it says so
    /// and stay valid until the stream has passed; `stream` is a stream of this device, and no page
    /// is written twice.
    ///
    /// # Errors
    /// `InvalidArgument` for host memory that is not pinned, `Driver` when the driver refuses.
    pub unsafe fn copy_pages(&self, call: &CopyPagesLaunch<'_>) -> Result<(), CudaError> {
        let page = call.page_bytes;
        let (source, target) =
            (self.begin("source", call.source)?, self.begin("target", call.target)?);
        let copies = call.spans.iter().map(|span| CopiedRows {
            source: source + (span.from * page) as u64,
            target: target + (span.to * page) as u64,
            width: span.pages * page,
            rows: span.rows,
            source_pitch: span.from_step * page,
            target_pitch: span.to_step * page,
        });
        // SAFETY: spans and arenas are the caller's promise; memory of the host is pinned.
        unsafe { copy_rows(&self.context, copies, call.stream) }
    }

    /// Where an arena begins, in the address space that host and device share.
    fn begin(&self, what: &'static str, of: CopiedArena) -> Result<u64, CudaError> {
        let DeviceTensor { address, len } = of.data;
        if !of.on_host || len == 0 || reachable(&self.context, address, len).is_some() {
            return Ok(address);
        }
        Err(CudaError::invalid(what, "pages on a CUDA device or in pinned memory", "pageable ones"))
    }
}
