//! Params of `recycle_pages`.

use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_size};
use super::select_pages::SelectPages;

/// A slot that holds no page.
pub const NO_PAGE: i32 = -1;

/// Brings the pages that each of R rows selected into the slots that the row has on a device
/// (FlexiCache, section 3.4): pages that a slot holds already stay where they are, and each of the
/// others, in ascending order, takes the first slot that is left.
///
/// A row is a request's KV head of one layer. A slot is left unless it is pinned or holds a page
/// that is selected; it may be empty. What a slot held before is forgotten, so a page has to be
/// somewhere else before its slot is left.
#[derive(Debug)]
pub struct RecyclePages<'a> {
    /// [R, K]: pages that rows selected, ascending, of which the first `selected` count.
    pub pages: &'a [i32],
    /// K.
    pub most: usize,
    /// [R]: from 0 to K.
    pub selected: &'a [i32],
    /// Pages of a row are below this.
    pub limit: usize,
    /// [R, S]: slots that are never given to another page are not 0; none are pinned without it.
    pub pinned: Option<&'a [u8]>,
    /// [R, S]: the page that each slot holds, or [`NO_PAGE`]; no page twice in a row.
    pub slots: &'a mut [i32],
    /// S.
    pub width: usize,
    /// [R, K]: the slot of each selected page; −1 behind them.
    pub places: &'a mut [i32],
    /// [R · min(K, S)]: row, page and slot of what has to be brought, by row and then by page. What
    /// lies behind the count stays as it is.
    pub moves: &'a mut [[i32; 3]],
    /// [1]: how many moves there are.
    pub count: &'a mut [i32],
    /// [R]: 1 for rows that were left as they are, for a reason that only a device sees; else 0.
    pub refused: &'a mut [i32],
}

impl RecyclePages<'_> {
    /// Proves that the shapes agree, that every page is in range, that a row's selection ascends
    /// and its slots hold no page twice, and that what is selected fits beside what is pinned.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let rows = self.selected.len();
        let moves = Self::most_moves(rows, self.most, self.width, self.limit)?;
        ensure_size("slots", &[rows, self.width], self.slots.len())?;
        if let Some(pinned) = self.pinned {
            ensure_size("pinned", &[rows, self.width], pinned.len())?;
        }
        ensure_size("places", &[rows, self.most], self.places.len())?;
        ensure_len("moves", moves, self.moves.len())?;
        ensure_len("count", 1, self.count.len())?;
        ensure_len("refused", rows, self.refused.len())?;
        Self::check_selection((self.pages, self.most), self.selected, self.limit)?;
        (0..rows).try_for_each(|row| self.check_row(row))
    }

    /// The most moves that there can be, of sizes that whole numbers of 32 bits can say.
    ///
    /// # Errors
    /// An [`OpError`] that names the size.
    pub fn most_moves(
        rows: usize,
        most: usize,
        width: usize,
        limit: usize,
    ) -> Result<usize, OpError> {
        let largest = i32::MAX.unsigned_abs() as usize;
        let sizes = [
            ("width of pages", most),
            ("width of slots", width),
            ("limit", limit),
            ("moves", rows.saturating_mul(most.min(width))),
        ];
        for (what, size) in sizes {
            ensure(size <= largest, OpErrorKind::OutOfRange, what, || {
                (format!("at most {largest}"), size)
            })?;
        }
        Ok(rows * most.min(width))
    }

    /// Proves that rows [R, `most`] of pages ascend from 0 to below `limit`, as far as each row
    /// selects them. Slots and results may be elsewhere, such as on a device.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn check_selection(
        (pages, most): (&[i32], usize),
        selected: &[i32],
        limit: usize,
    ) -> Result<(), OpError> {
        ensure_size("pages", &[selected.len(), most], pages.len())?;
        SelectPages::check_numbers("selected", selected, (0, most))?;
        for (row, &count) in selected.iter().enumerate() {
            let chosen = &pages[row * most..][..count as usize];
            if let Some(pair) = chosen.windows(2).find(|pair| pair[0] >= pair[1]) {
                let (expected, got) = ("ascending numbers in each row", format!("{pair:?}"));
                return Err(OpError::new(OpErrorKind::OutOfRange, "pages", expected, got));
            }
            let ends = [chosen.first(), chosen.last()].into_iter().flatten();
            check_pages("pages", ends.copied(), limit)?;
        }
        Ok(())
    }

    /// The slots of a row, which selects `chosen`.
    fn check_row(&self, row: usize) -> Result<(), OpError> {
        let chosen = &self.pages[row * self.most..][..self.selected[row] as usize];
        let slots = &self.slots[row * self.width..][..self.width];
        let mut held: Vec<i32> = slots.iter().copied().filter(|&page| page != NO_PAGE).collect();
        check_pages("slots", held.iter().copied(), self.limit)?;
        held.sort_unstable();
        if let Some(pair) = held.windows(2).find(|pair| pair[0] == pair[1]) {
            let expected = "no page in two slots of a row";
            return Err(OpError::new(OpErrorKind::Overlap, "slots", expected, pair[0]));
        }
        let Some(pinned) = self.pinned else { return self.check_room(chosen.len(), 0) };
        let pinned = &pinned[row * self.width..][..self.width];
        let of_others = pinned
            .iter()
            .zip(slots)
            .filter(|&(&pin, page)| pin != 0 && chosen.binary_search(page).is_err());
        self.check_room(chosen.len(), of_others.count())
    }

    fn check_room(&self, chosen: usize, of_others: usize) -> Result<(), OpError> {
        let fits = chosen.checked_add(of_others).is_some_and(|both| both <= self.width);
        ensure(fits, OpErrorKind::OutOfRange, "selected", || {
            let slots = format!("{} slots, {of_others} of them pinned to others", self.width);
            (format!("at most as many pages as fit into {slots}"), chosen)
        })
    }
}

fn check_pages(
    what: &'static str,
    mut pages: impl Iterator<Item = i32>,
    limit: usize,
) -> Result<(), OpError> {
    let fits = |page: i32| usize::try_from(page).is_ok_and(|page| page < limit);
    match pages.find(|&page| !fits(page)) {
        None => Ok(()),
        Some(outside) => {
            let expected = format!("pages from 0 to below {limit}");
            Err(OpError::new(OpErrorKind::OutOfRange, what, expected, outside))
        }
    }
}
