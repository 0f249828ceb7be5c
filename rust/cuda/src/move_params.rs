//! Params of the kernels that bring pages into slots and carry them, as `csrc/api.h` lays them out.

/// Mirror of `RecycleSeatsParams`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RecycleSeatsParams {
    /// i32 [rows / ranks], or 0: rows have no seats.
    pub(crate) of: u64,
    /// i32 [ranks].
    pub(crate) heads: u64,
    /// i32 [seats].
    pub(crate) away: u64,
    /// i32 [seats, width].
    pub(crate) blocks: u64,
    /// i32 [requests, heads_of_pages, most, 5].
    pub(crate) entries: u64,
    pub(crate) seats: u32,
    pub(crate) ranks: u32,
    pub(crate) heads_of_pages: u32,
    pub(crate) ranks_of_seat: u32,
    pub(crate) first: u32,
    pub(crate) by_seat: u32,
}

/// Mirror of `RecyclePagesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RecyclePagesParams {
    /// i32 [rows, most].
    pub(crate) pages: u64,
    /// i32 [rows].
    pub(crate) selected: u64,
    /// u8 [rows, width], or 0.
    pub(crate) pinned: u64,
    /// i32 [rows, width].
    pub(crate) slots: u64,
    /// i32 [rows, most].
    pub(crate) places: u64,
    /// i32 [rows · min(most, width), 3].
    pub(crate) moves: u64,
    /// i32 [1].
    pub(crate) count: u64,
    /// i32 [rows].
    pub(crate) refused: u64,
    /// Workspace, u32 [thread blocks + 1].
    pub(crate) states: u64,
    pub(crate) rows: u32,
    pub(crate) most: u32,
    pub(crate) width: u32,
    pub(crate) limit: u32,
    pub(crate) team_bytes: u32,
    pub(crate) seats: RecycleSeatsParams,
}

/// Mirror of `RowPagesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RowPagesParams {
    pub(crate) data: u64,
    /// i32 [rows / ranks, width].
    pub(crate) blocks: u64,
    pub(crate) pages: i64,
    pub(crate) rows: u32,
    pub(crate) width: u32,
    pub(crate) ranks: u32,
}

/// Mirror of `MovePagesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct MovePagesParams {
    /// i32 [most, 3].
    pub(crate) moves: u64,
    /// i32 [1].
    pub(crate) count: u64,
    pub(crate) slots: RowPagesParams,
    pub(crate) home: RowPagesParams,
    pub(crate) most: u32,
    pub(crate) page_bytes: u32,
    pub(crate) page_pieces: u32,
    pub(crate) spills: u32,
}

/// Mirror of `MoveFp8PagesParams`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct MoveFp8PagesParams {
    /// i32 [most, 3].
    pub(crate) moves: u64,
    /// i32 [1].
    pub(crate) count: u64,
    pub(crate) slots: RowPagesParams,
    pub(crate) home: RowPagesParams,
    /// u8 [pages of home, 2].
    pub(crate) scales: u64,
    pub(crate) most: u32,
    pub(crate) page: u32,
    pub(crate) page_pieces: u32,
}

const _: () = assert!(size_of::<RecyclePagesParams>() == 160);
const _: () = assert!(size_of::<RowPagesParams>() == 40);
const _: () = assert!(size_of::<MovePagesParams>() == 112);
const _: () = assert!(size_of::<MoveFp8PagesParams>() == 120);
