//! Launch of `gather_entries.cu`.

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::Grid;
use crate::operands::{DeviceTensor, blocks_of, narrow};
use crate::paged::DeviceReach;
use crate::params::GatherEntriesParams;

const THREADS: u32 = 128;
/// Numbers of an entry.
const COLUMNS: usize = 5;

/// What rows of requests selected last. A row outside is nobody's: nothing is kept there.
#[derive(Clone, Copy, Debug)]
pub struct KeptPages {
    /// i32 [rows, G, most], contiguous, written in place.
    pub pages: DeviceTensor,
    /// N.
    pub rows: usize,
    /// i32 [B]: whose each request's are.
    pub of: DeviceTensor,
    /// u8 [B]: whether they go on with them.
    pub again: DeviceTensor,
}

/// Selected pages as entry tables of their own: `kvweave_core::ops::GatherEntries`, of which
/// `validate_gathered` is the caller's to ask. The kernel takes an index outside its table as no
/// entry; offsets are taken as they are.
#[derive(Clone, Copy, Debug)]
pub struct GatherEntriesLaunch<'a> {
    /// i32 [B, G, most], contiguous.
    pub pages: DeviceTensor,
    /// i32 [B, G].
    pub selected: DeviceTensor,
    /// B.
    pub requests: usize,
    /// G.
    pub kv_heads: usize,
    /// K.
    pub most: usize,
    /// i32 [N, 5], contiguous.
    pub entries: DeviceTensor,
    /// i32 [B·R + 1].
    pub entry_offsets: DeviceTensor,
    /// Table of each head, where they differ.
    pub reach: Option<DeviceReach<'a>>,
    /// i32 [B·G·most, 5], contiguous.
    pub gathered: DeviceTensor,
    /// i32 [2·B·G + 1].
    pub offsets: DeviceTensor,
    /// What requests selected before, where some go on with that.
    pub kept: Option<KeptPages>,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

impl CudaBackend {
    /// Puts the gather on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, and `stream` is a stream of this device.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn gather_entries(&self, call: &GatherEntriesLaunch<'_>) -> Result<(), CudaError> {
        let params = params_of(call)?;
        let rows = blocks_of("rows of pages", call.requests.saturating_mul(call.kv_heads))?;
        if rows == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: [rows, 1, 1], threads: THREADS, shared_bytes: 0 };
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("gather_entries", "gather_entries"), grid, call.stream, &params) }
    }
}

fn params_of(call: &GatherEntriesLaunch<'_>) -> Result<GatherEntriesParams, CudaError> {
    let sizes = [call.requests, call.kv_heads, call.most];
    let tables = call.reach.map_or(1, |reach| reach.tables);
    let rows = call.requests.saturating_mul(call.kv_heads);
    call.pages.expect_size("pages", &sizes)?;
    call.selected.expect("selected", rows)?;
    let spans = call.requests.saturating_mul(tables);
    call.entry_offsets.expect("entry_offsets", spans.saturating_add(1))?;
    call.gathered.expect_size("gathered", &[rows, call.most, COLUMNS])?;
    call.offsets.expect("offsets", rows.saturating_mul(2).saturating_add(1))?;
    if let Some(kept) = call.kept {
        kept.pages.expect_size("kept", &[kept.rows, call.kv_heads, call.most])?;
        kept.of.expect("rows", call.requests)?;
        kept.again.expect("again", call.requests)?;
    }
    let address =
        |of: fn(&KeptPages) -> DeviceTensor| call.kept.as_ref().map_or(0, |kept| of(kept).address);
    Ok(GatherEntriesParams {
        pages: call.pages.address,
        selected: call.selected.address,
        entries: call.entries.address,
        entry_offsets: call.entry_offsets.address,
        heads: call.reach.map_or(0, |reach| reach.heads.address()),
        gathered: call.gathered.address,
        offsets: call.offsets.address,
        kept: address(|kept| kept.pages),
        kept_of: address(|kept| kept.of),
        again: address(|kept| kept.again),
        kv_heads: narrow("heads of pages", call.kv_heads)?,
        tables: narrow("tables", tables)?,
        most: narrow("width of pages", call.most)?,
        kept_rows: narrow("rows that are kept", call.kept.map_or(0, |kept| kept.rows))?,
    })
}
