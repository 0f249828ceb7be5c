//! Launch of `recycle_pages.cu`.

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::ffi::{Description, Grid};
use crate::move_params::{RecyclePagesParams, RecycleSeatsParams};
use crate::operands::{DeviceTensor, blocks_of, narrow};

/// `kThreads` of the kernels.
const THREADS: usize = 256;
const WARP: usize = 32;
/// The most numbers of a row that a warp takes; longer rows are a thread block's.
const WARP_ROW: usize = 1024;
/// Shared memory of a thread block beyond which rows are a thread block's each.
const WARP_BYTES: usize = 64 << 10;
/// The kernel counts slots in 16 bits, of which one number is none.
const MOST_NUMBERS: usize = 65_535;
/// Numbers of an entry.
const COLUMNS: usize = 5;
/// Shared memory that the kernel has beside that of rows.
const OWN_BYTES: usize = 1024;

/// Rows that are heads of requests with seats: what a row selects are the first pages of its list,
/// which lie elsewhere, its slots are its seat's, and moves say seat · ranks + rank for a row. A
/// request whose seat is none of them is left as it is, and so is a head that lists do not have.
#[derive(Clone, Copy, Debug)]
pub struct SeatedRows {
    /// i32 [R / ranks]: the seat of each request.
    pub of: DeviceTensor,
    /// i32 [ranks]: whose pages a request's rows have.
    pub heads: DeviceTensor,
    /// i32 [seats]: pages below this lie elsewhere.
    pub away: DeviceTensor,
    /// i32 [seats, width], contiguous: what slots are called.
    pub blocks: DeviceTensor,
    /// i32 [R / ranks, `heads_of_pages`, most, 5], contiguous: of the pages that are listed; what
    /// lies elsewhere gets the name of its slot.
    pub entries: DeviceTensor,
    /// How many there are.
    pub seats: usize,
    /// Rows of a request.
    pub ranks: usize,
    /// Heads that pages and entries are of.
    pub heads_of_pages: usize,
    /// Rows of slots that a seat has.
    pub ranks_of_seat: usize,
    /// Of these the one of a request's first row.
    pub first: usize,
    /// Whether pages are [seats, …], of which each request's are its seat's.
    pub by_seat: bool,
}

/// Selected pages into the slots of rows: `kvweave_core::ops::RecyclePages`, whose checks of a
/// selection are the caller's where it is on the host. The kernel leaves a row as it is that is not
/// as it has to be, and says so.
#[derive(Clone, Copy, Debug)]
pub struct RecyclePagesLaunch {
    /// i32 [rows, most], contiguous; as `seats` says, where there are any.
    pub pages: DeviceTensor,
    /// K.
    pub most: usize,
    /// i32 [rows]; nothing where there are seats.
    pub selected: DeviceTensor,
    /// R.
    pub rows: usize,
    /// Pages of a row are below this.
    pub limit: usize,
    /// u8 [rows, width], contiguous.
    pub pinned: Option<DeviceTensor>,
    /// i32 [rows, width], contiguous, written in place; [seats · `ranks_of_seat`, width] of seats.
    pub slots: DeviceTensor,
    /// S.
    pub width: usize,
    /// i32 [rows, most], contiguous.
    pub places: DeviceTensor,
    /// i32 [rows · min(most, width), 3], contiguous.
    pub moves: DeviceTensor,
    /// i32 [1].
    pub count: DeviceTensor,
    /// i32 [rows].
    pub refused: DeviceTensor,
    /// i32 [at least `RecyclePlan::counters`], 0 before and after.
    pub counters: DeviceTensor,
    /// Whose rows are, where requests have seats.
    pub seats: Option<SeatedRows>,
    /// The stream's handle; 0 is the default stream.
    pub stream: u64,
}

/// How a call is cut, by its sizes alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecyclePlan {
    kernel: &'static str,
    grid: Grid,
    team_bytes: usize,
}

impl RecyclePlan {
    /// Numbers of workspace that are 0 between calls.
    #[must_use]
    pub fn counters(&self) -> usize {
        self.grid.blocks[0] as usize + 1
    }

    fn of(device: &Description, call: &RecyclePagesLaunch) -> Result<Self, CudaError> {
        let sizes = [("width of pages", call.most), ("width of slots", call.width)];
        for (what, size) in sizes {
            if size > MOST_NUMBERS {
                let expected = format!("at most {MOST_NUMBERS}");
                return Err(CudaError::unsupported(what, expected, size));
            }
        }
        // Two bitmaps of words, four at a time, and a rank of 16 bits for each; a slot for each
        // page that is selected, in pairs, and one for each that can be missing, with what is.
        let words = call.limit.div_ceil(4 * WARP).saturating_mul(4);
        let chosen = call.most.next_multiple_of(2);
        let numbers = words.saturating_add(chosen + 2 * call.most.min(call.width));
        let bytes = words.saturating_mul(8).saturating_add(numbers.saturating_mul(2));
        let team_bytes = bytes.saturating_add(15) / 16 * 16;
        let teams = THREADS / WARP;
        let of_warps = teams.saturating_mul(team_bytes);
        let is_short = call.most.max(call.width) <= WARP_ROW && of_warps <= WARP_BYTES;
        let (kernel, teams) =
            if is_short { ("recycle_pages_warp", teams) } else { ("recycle_pages_block", 1) };
        let shared_bytes = teams.saturating_mul(team_bytes);
        if !device.gives(shared_bytes.saturating_add(OWN_BYTES)) {
            let expected = "as many pages as two bits each fit into shared memory for";
            return Err(CudaError::unsupported("limit", expected, call.limit));
        }
        // Without rows one thread block says that there are no moves.
        let blocks = blocks_of("rows of slots", call.rows.div_ceil(teams).max(1))?;
        let grid = Grid {
            blocks: [blocks, 1, 1],
            threads: THREADS as u32,
            shared_bytes: narrow("limit", shared_bytes)?,
        };
        Ok(Self { kernel, grid, team_bytes })
    }
}

impl CudaBackend {
    /// How a call is cut, and so what workspace it needs.
    ///
    /// # Errors
    /// `Unsupported` for rows that are longer than the kernels take.
    pub fn plan_recycle(&self, call: &RecyclePagesLaunch) -> Result<RecyclePlan, CudaError> {
        RecyclePlan::of(&self.context.device, call)
    }

    /// Puts the call on the stream. Nothing is waited for, nothing allocated.
    ///
    /// # Safety
    /// Addresses and sizes describe memory of this device that stays valid until the stream has
    /// run the kernel, `stream` is a stream of this device, the plan is the call's, and counters
    /// are 0 and no other call's meanwhile.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes that do not belong together, `Driver` when the launch fails.
    pub unsafe fn recycle_pages(
        &self,
        call: &RecyclePagesLaunch,
        plan: &RecyclePlan,
    ) -> Result<(), CudaError> {
        let params = params_of(call, plan)?;
        // SAFETY: the params mirror the kernel's struct; addresses are the caller's promise.
        unsafe { self.launch(("recycle_pages", plan.kernel), plan.grid, call.stream, &params) }
    }
}

fn params_of(
    call: &RecyclePagesLaunch,
    plan: &RecyclePlan,
) -> Result<RecyclePagesParams, CudaError> {
    let RecyclePagesLaunch { rows, most, width, .. } = *call;
    match &call.seats {
        Some(seats) => seats.expect(call)?,
        None => {
            call.pages.expect_size("pages", &[rows, most])?;
            call.selected.expect("selected", rows)?;
        }
    }
    let slot_rows =
        call.seats.map_or(rows, |seats| seats.seats.saturating_mul(seats.ranks_of_seat));
    call.slots.expect_size("slots", &[slot_rows, width])?;
    call.places.expect_size("places", &[rows, most])?;
    call.moves.expect_size("moves", &[rows, most.min(width), 3])?;
    call.count.expect("count", 1)?;
    call.refused.expect("refused", rows)?;
    call.counters.expect("counters", plan.counters())?;
    if let Some(pinned) = call.pinned {
        pinned.expect_size("pinned", &[slot_rows, width])?;
    }
    Ok(RecyclePagesParams {
        pages: call.pages.address,
        selected: call.selected.address,
        pinned: call.pinned.map_or(0, |pinned| pinned.address),
        slots: call.slots.address,
        places: call.places.address,
        moves: call.moves.address,
        count: call.count.address,
        refused: call.refused.address,
        states: call.counters.address,
        rows: narrow("rows of slots", rows)?,
        most: narrow("width of pages", most)?,
        width: narrow("width of slots", width)?,
        limit: narrow("limit", call.limit)?,
        team_bytes: narrow("limit", plan.team_bytes)?,
        seats: call
            .seats
            .map_or_else(|| Ok(RecycleSeatsParams::default()), |seats| seats.params())?,
    })
}

impl SeatedRows {
    /// Refuses sizes that do not belong together.
    fn expect(&self, call: &RecyclePagesLaunch) -> Result<(), CudaError> {
        let RecyclePagesLaunch { rows, most, width, .. } = *call;
        let requests = rows / self.ranks.max(1);
        if requests.saturating_mul(self.ranks) != rows {
            let expected = format!("a multiple of {} rows", self.ranks);
            return Err(CudaError::invalid("rows", expected, rows));
        }
        if self.first.saturating_add(self.ranks) > self.ranks_of_seat {
            let expected = format!("at most {} ranks", self.ranks_of_seat);
            return Err(CudaError::invalid("ranks", expected, self.first + self.ranks));
        }
        let lists = if self.by_seat { self.seats } else { requests };
        call.pages.expect_size("pages", &[lists, self.heads_of_pages, most])?;
        self.entries.expect_size("entries", &[requests, self.heads_of_pages, most, COLUMNS])?;
        self.of.expect("seats", requests)?;
        self.heads.expect("heads", self.ranks)?;
        self.away.expect("away", self.seats)?;
        self.blocks.expect_size("blocks", &[self.seats, width])
    }

    fn params(&self) -> Result<RecycleSeatsParams, CudaError> {
        Ok(RecycleSeatsParams {
            of: self.of.address,
            heads: self.heads.address,
            away: self.away.address,
            blocks: self.blocks.address,
            entries: self.entries.address,
            seats: narrow("seats", self.seats)?,
            ranks: narrow("ranks", self.ranks)?,
            heads_of_pages: narrow("heads of pages", self.heads_of_pages)?,
            ranks_of_seat: narrow("ranks of a seat", self.ranks_of_seat)?,
            first: narrow("first rank", self.first)?,
            by_seat: u32::from(self.by_seat),
        })
    }
}
