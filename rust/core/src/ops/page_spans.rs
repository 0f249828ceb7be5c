//! Moves as few copies: pages that follow each other, and such runs at even distances.

/// `rows` runs of `pages` pages each, from page `from` of what is read to page `to` of what is
/// written; each further run lies so many pages behind the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSpan {
    /// First page that is read.
    pub from: usize,
    /// First page that is written.
    pub to: usize,
    /// Pages of a run, at least 1.
    pub pages: usize,
    /// Runs, at least 1.
    pub rows: usize,
    /// From the first page of a run to that of the next, where it is read; at least `pages`.
    pub from_step: usize,
    /// The same where it is written.
    pub to_step: usize,
}

impl PageSpan {
    fn run(from: usize, to: usize) -> Self {
        Self { from, to, pages: 1, rows: 1, from_step: 1, to_step: 1 }
    }

    /// Takes the page behind the run's last, if it is that.
    fn lengthen(&mut self, (from, to): (usize, usize)) -> bool {
        let follows = (from, to) == (self.from + self.pages, self.to + self.pages);
        if follows {
            self.pages += 1;
            (self.from_step, self.to_step) = (self.pages, self.pages);
        }
        follows
    }

    /// Takes a run that lies as far behind the last as that behind the one before.
    fn repeat(&mut self, next: &Self) -> bool {
        if next.pages != self.pages || next.rows != 1 {
            return false;
        }
        let behind =
            |first: usize, next: usize| next.checked_sub(first).filter(|&s| s >= self.pages);
        let last = self.rows - 1;
        let steps = (
            behind(self.from + last * self.from_step, next.from),
            behind(self.to + last * self.to_step, next.to),
        );
        let (Some(from_step), Some(to_step)) = steps else { return false };
        if self.rows > 1 && (from_step, to_step) != (self.from_step, self.to_step) {
            return false;
        }
        (self.rows, self.from_step, self.to_step) = (self.rows + 1, from_step, to_step);
        true
    }

    /// The pages, in order: from where to where.
    pub fn iter(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.rows).flat_map(move |row| {
            let (from, to) = (self.from + row * self.from_step, self.to + row * self.to_step);
            (0..self.pages).map(move |page| (from + page, to + page))
        })
    }
}

/// Moves of pages, from where to where, as spans that do the same in the same order.
#[must_use]
pub fn page_spans(moves: impl Iterator<Item = (usize, usize)>) -> Vec<PageSpan> {
    let mut spans: Vec<PageSpan> = Vec::new();
    let mut run: Option<PageSpan> = None;
    for (from, to) in moves {
        if run.as_mut().is_some_and(|run| run.lengthen((from, to))) {
            continue;
        }
        if let Some(run) = run.replace(PageSpan::run(from, to)) {
            add(&mut spans, run);
        }
    }
    if let Some(run) = run {
        add(&mut spans, run);
    }
    spans
}

fn add(spans: &mut Vec<PageSpan>, run: PageSpan) {
    if !spans.last_mut().is_some_and(|last| last.repeat(&run)) {
        spans.push(run);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{PageSpan, page_spans};

    #[test]
    fn runs_at_even_distances_are_one_span() {
        let moves = (0..5).flat_map(|row| (0..3).map(move |p| (100 + row * 8 + p, row * 4 + p)));
        let span = PageSpan { from: 100, to: 0, pages: 3, rows: 5, from_step: 8, to_step: 4 };
        assert_eq!(page_spans(moves), [span]);
    }

    #[test]
    fn what_lies_without_gaps_is_one_run() {
        let span = PageSpan { from: 7, to: 2, pages: 9, rows: 1, from_step: 9, to_step: 9 };
        assert_eq!(page_spans((0..9).map(|page| (7 + page, 2 + page))), [span]);
        assert_eq!(page_spans(std::iter::empty()), []);
    }

    proptest! {
        /// Whatever the moves are, spans do them, in their order.
        #[test]
        fn spans_are_the_moves(
            jumps in prop::collection::vec((0usize..4, 0usize..4, 1usize..6), 0..40),
        ) {
            let (mut from, mut to) = (0, 0);
            let mut moves = Vec::new();
            for (back, ahead, pages) in jumps {
                from = (from + 3 * ahead).saturating_sub(back);
                to += ahead;
                for _ in 0..pages {
                    moves.push((from, to));
                    (from, to) = (from + 1, to + 1);
                }
            }
            let spans = page_spans(moves.iter().copied());
            let again: Vec<_> = spans.iter().flat_map(|span| span.iter()).collect();
            prop_assert_eq!(again, moves);
            prop_assert!(spans.iter().all(|s| s.from_step >= s.pages && s.to_step >= s.pages));
        }
    }
}
