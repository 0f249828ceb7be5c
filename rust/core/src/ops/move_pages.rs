//! Params of `move_pages`.

use super::error::{OpError, OpErrorKind, ensure, ensure_len};

/// Carries whole pages between the slots of rows and the places where all their pages have room:
/// the moves that `recycle_pages` makes, or others of the same form.
///
/// Bytes are moved, whatever they stand for. Every page of a call is one move's alone on the side
/// that is written.
#[derive(Debug)]
pub struct MovePages<'a> {
    /// What is moved where.
    pub moves: Moves<'a>,
    /// Bytes of a page, at least 1.
    pub page_bytes: usize,
    /// The arena that is read.
    pub source: &'a [u8],
    /// The arena that is written.
    pub target: &'a mut [u8],
}

/// Moves, and where the numbers in them lie.
#[derive(Clone, Copy, Debug)]
pub struct Moves<'a> {
    /// Rows `[row, page, slot]`, of which the first `count` count.
    pub moves: &'a [[i32; 3]],
    /// [1].
    pub count: &'a [i32],
    /// Where the slots of rows lie: on the device.
    pub slots: RowPages<'a>,
    /// Where their pages lie.
    pub home: RowPages<'a>,
    /// From which of the two to the other.
    pub way: Way,
}

/// Pages of an arena by the numbers that rows give them: number n of row r is page
/// `blocks[r / ranks][n] + r % ranks` of the arena.
#[derive(Clone, Copy, Debug)]
pub struct RowPages<'a> {
    /// [N, W]: a number below 0 is nowhere.
    pub blocks: &'a [i32],
    /// W.
    pub width: usize,
    /// Rows of a row of blocks, at least 1.
    pub ranks: usize,
    /// Pages of the arena.
    pub pages: usize,
}

/// Which way pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From where they lie into the slots.
    Fetch,
    /// From the slots to where they lie.
    Spill,
}

impl RowPages<'_> {
    /// The arena's page under a number of a row; nothing outside either.
    #[must_use]
    pub fn page(&self, row: i32, number: i32) -> Option<usize> {
        let (row, number) = (usize::try_from(row).ok()?, usize::try_from(number).ok()?);
        if number >= self.width {
            return None;
        }
        let first = self.blocks.get((row / self.ranks).checked_mul(self.width)? + number)?;
        let page = usize::try_from(*first).ok()?.checked_add(row % self.ranks)?;
        (page < self.pages).then_some(page)
    }

    fn validate(&self, what: &'static str) -> Result<(), OpError> {
        ensure(self.ranks > 0, OpErrorKind::OutOfRange, "ranks", || ("at least 1", self.ranks))?;
        let whole = match self.width {
            0 => self.blocks.is_empty(),
            width => self.blocks.len().is_multiple_of(width),
        };
        ensure(whole, OpErrorKind::Shape, what, || {
            (format!("rows of {} numbers", self.width), self.blocks.len())
        })
    }
}

impl Moves<'_> {
    /// The moves that count, as pages of the arena that is read and of the one that is written,
    /// once `validate` accepted them.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let count = self.count.first().map_or(0, |&count| usize::try_from(count).unwrap_or(0));
        self.moves.iter().take(count).filter_map(|&step| self.ends(step))
    }

    fn ends(&self, [row, page, slot]: [i32; 3]) -> Option<(usize, usize)> {
        let (slot, page) = (self.slots.page(row, slot)?, self.home.page(row, page)?);
        Some(match self.way {
            Way::Fetch => (page, slot),
            Way::Spill => (slot, page),
        })
    }

    /// Proves that what counts lies within both arenas, and that no page is written twice. The
    /// arenas may be elsewhere, such as on a device.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        self.slots.validate("blocks of slots")?;
        self.home.validate("blocks of home")?;
        ensure_len("count", 1, self.count.len())?;
        let most = self.moves.len();
        let count = usize::try_from(self.count[0]).ok().filter(|&count| count <= most);
        let Some(count) = count else {
            let expected = format!("from 0 to the {most} moves there are");
            return Err(OpError::new(OpErrorKind::OutOfRange, "count", expected, self.count[0]));
        };
        let mut written = Vec::with_capacity(count);
        for &step in &self.moves[..count] {
            let Some((_, to)) = self.ends(step) else {
                let expected = "a row, a page and a slot with a place in both arenas";
                let got = format!("{step:?}");
                return Err(OpError::new(OpErrorKind::OutOfRange, "moves", expected, got));
            };
            written.push(to);
        }
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            let expected = "no page to be written twice";
            return Err(OpError::new(OpErrorKind::Overlap, "moves", expected, pair[0]));
        }
        Ok(())
    }
}

impl MovePages<'_> {
    /// Proves that all moves lie within both arenas, and that no page is written twice.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let bytes = self.page_bytes;
        ensure(bytes > 0, OpErrorKind::Shape, "bytes of a page", || ("at least 1", bytes))?;
        let (read, written) = match self.moves.way {
            Way::Fetch => (self.moves.home.pages, self.moves.slots.pages),
            Way::Spill => (self.moves.slots.pages, self.moves.home.pages),
        };
        for (what, pages, arena) in
            [("source", read, self.source.len()), ("target", written, self.target.len())]
        {
            ensure(pages.checked_mul(bytes) == Some(arena), OpErrorKind::Shape, what, || {
                (format!("{pages} pages of {bytes} bytes"), format!("{arena} bytes"))
            })?;
        }
        self.moves.validate()
    }
}
