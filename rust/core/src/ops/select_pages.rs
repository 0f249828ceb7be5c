//! Params of `select_pages`.

use std::cmp::Ordering;

use super::error::{OpError, OpErrorKind, ensure, ensure_len, ensure_size};

/// Of the pages that each of R rows lists, those that a decode step reads: the first `sink` and the
/// last `recent` of them, and of the others the best by score, up to the row's budget (FlexiCache,
/// section 3.2, after Quest).
///
/// A row's answer depends on its own scores alone. The order is total: a higher score first, of
/// equal ones the lower index (0 and −0 are equal), and NaN before all, so that a page whose keys
/// are NaN is read and not passed over in silence. A row with no more pages than its budget selects
/// all of them.
#[derive(Debug)]
pub struct SelectPages<'a> {
    /// [R, S]: rows of scores, of which the first `counts[row]` are a row's.
    pub scores: &'a [f32],
    /// S.
    pub width: usize,
    /// [R]: pages of each row, from 0 to S.
    pub counts: &'a [i32],
    /// [R]: the most pages that a row selects, from `sink + recent` to K.
    pub budgets: &'a [i32],
    /// Pages at the start of a row that are always selected.
    pub sink: usize,
    /// Pages at the end of a row that are always selected.
    pub recent: usize,
    /// [R, K]: the indices that were selected, ascending; −1 behind them.
    pub pages: &'a mut [i32],
    /// K.
    pub most: usize,
    /// [R]: how many were selected.
    pub selected: &'a mut [i32],
}

impl SelectPages<'_> {
    /// Proves that the shapes agree and that every count and budget is in range.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn validate(&self) -> Result<(), OpError> {
        let (rows, limit) = (self.counts.len(), i32::MAX.unsigned_abs() as usize);
        for (what, size) in [("width of scores", self.width), ("width of pages", self.most)] {
            ensure(size <= limit, OpErrorKind::OutOfRange, what, || {
                (format!("at most {limit}"), size)
            })?;
        }
        ensure_size("scores", &[rows, self.width], self.scores.len())?;
        ensure_size("pages", &[rows, self.most], self.pages.len())?;
        ensure_len("budgets", rows, self.budgets.len())?;
        ensure_len("selected", rows, self.selected.len())?;
        let always = self.sink.saturating_add(self.recent);
        Self::check_numbers("counts", self.counts, (0, self.width))?;
        Self::check_numbers("budgets", self.budgets, (always, self.most))?;
        Ok(())
    }

    /// Proves that counts or budgets, called `what`, lie from `least` to `most`. Scores and results
    /// may be elsewhere, such as on a device.
    ///
    /// # Errors
    /// An [`OpError`] that names the argument.
    pub fn check_numbers(
        what: &'static str,
        numbers: &[i32],
        (least, most): (usize, usize),
    ) -> Result<(), OpError> {
        let fits = |n: i32| usize::try_from(n).is_ok_and(|n| (least..=most).contains(&n));
        match numbers.iter().find(|&&n| !fits(n)) {
            None => Ok(()),
            Some(outside) => {
                let expected = format!("numbers from {least} to {most}");
                Err(OpError::new(OpErrorKind::OutOfRange, what, expected, outside))
            }
        }
    }

    /// Which of two pages of a row comes first: by score, then by index.
    #[must_use]
    pub fn before(one: (f32, usize), other: (f32, usize)) -> Ordering {
        Self::key(other.0).cmp(&Self::key(one.0)).then(one.1.cmp(&other.1))
    }

    /// A number that is greater where the score comes first.
    #[must_use]
    pub fn key(score: f32) -> u32 {
        if score.is_nan() {
            return u32::MAX;
        }
        // −0 becomes 0.
        let bits = (score + 0.0).to_bits();
        if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use proptest::prelude::*;

    use super::SelectPages;

    proptest! {
        #[test]
        fn keys_order_as_scores_do(one in any::<f32>(), other in any::<f32>()) {
            let (a, b) = (SelectPages::key(one), SelectPages::key(other));
            match one.partial_cmp(&other) {
                Some(order) => prop_assert_eq!(a.cmp(&b), order),
                None => prop_assert_eq!(a.cmp(&b), one.is_nan().cmp(&other.is_nan())),
            }
        }
    }

    #[test]
    fn equal_scores_go_by_index() {
        for score in [0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(SelectPages::before((score, 3), (score, 4)), Ordering::Less);
        }
        assert_eq!(SelectPages::before((-0.0, 3), (0.0, 4)), Ordering::Less);
        assert_eq!(SelectPages::before((0.0, 4), (-0.0, 3)), Ordering::Greater);
        assert_eq!(SelectPages::before((f32::NAN, 9), (f32::INFINITY, 1)), Ordering::Less);
    }
}
