//! Params of `move_fp8_pages`.

use super::error::{OpError, OpErrorKind, ensure};
use super::fp8::Fp8E4m3;
use super::move_pages::{Moves, Way};

/// Carries whole pages, as [`MovePages`](super::MovePages), between slots of `T` and places where
/// they are e4m3 with two scales each: see [`PageScale`](super::PageScale).
#[derive(Debug)]
pub struct MoveFp8Pages<'a, T> {
    /// What is moved where.
    pub moves: Moves<'a>,
    /// Numbers of a page: as many of keys and then of values.
    pub page: usize,
    /// What is read and what is written.
    pub arenas: Fp8Arenas<'a, T>,
}

/// Pages at home with their scales, `[keys, values]` of each, and the slots.
#[derive(Debug)]
pub enum Fp8Arenas<'a, T> {
    /// Numbers are widened, exactly.
    Fetch {
        /// [pages, `page`].
        home: &'a [Fp8E4m3],
        /// [pages].
        scales: &'a [[u8; 2]],
        /// [pages, `page`].
        slots: &'a mut [T],
    },
    /// Numbers are rounded once.
    Spill {
        /// [pages, `page`].
        slots: &'a [T],
        /// [pages, `page`].
        home: &'a mut [Fp8E4m3],
        /// [pages].
        scales: &'a mut [[u8; 2]],
    },
}

impl<T> MoveFp8Pages<'_, T> {
    /// Proves that all moves lie within both arenas, and that no page is written twice.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let page = self.page;
        ensure(
            page > 0 && page.is_multiple_of(2),
            OpErrorKind::Shape,
            "numbers of a page",
            || ("as many of keys as of values, at least 1", page),
        )?;
        let (way, home, scales, slots) = match &self.arenas {
            Fp8Arenas::Fetch { home, scales, slots } => {
                (Way::Fetch, home.len(), scales.len(), slots.len())
            }
            Fp8Arenas::Spill { slots, home, scales } => {
                (Way::Spill, home.len(), scales.len(), slots.len())
            }
        };
        ensure(way == self.moves.way, OpErrorKind::InvalidArgument, "way", || {
            (format!("{way:?}"), format!("{:?}", self.moves.way))
        })?;
        let (at_home, in_slots) = (self.moves.home.pages, self.moves.slots.pages);
        for (what, pages, numbers, arena) in [
            ("home", at_home, page, home),
            ("scales", at_home, 1, scales),
            ("slots", in_slots, page, slots),
        ] {
            ensure(pages.checked_mul(numbers) == Some(arena), OpErrorKind::Shape, what, || {
                (format!("{pages} pages of {numbers}"), arena)
            })?;
        }
        self.moves.validate()
    }
}
