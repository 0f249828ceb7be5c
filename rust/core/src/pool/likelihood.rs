//! How likely a cached block is to be used again: as likely as others that were used as often.
//!
//! In some loads most texts never come again, and one that did is far likelier to come once more.
//! In others nearly all come again, and that one has is no news. So it is counted what became of
//! blocks: whether they were used again, or had to go before. The latest counts most: all counts
//! are halved as they grow.

/// A second use says something where it makes a block so much likelier to be used again, as the
/// ratio of two numbers; then such a block is worth twice as much as one that was used once.
const NEWS: (u64, u64) = (3, 2);
/// As if so many blocks of each kind had been seen, of which half came a second time, and all of
/// those once more.
const BEFORE: u64 = 64;

/// Blocks of one kind, by what became of them.
#[derive(Clone, Copy)]
struct Seen {
    used: u64,
    gone: u64,
}

impl Seen {
    fn all(self) -> u64 {
        self.used + self.gone
    }

    fn halve(&mut self) {
        (self.used, self.gone) = (self.used.div_ceil(2), self.gone.div_ceil(2));
    }
}

/// Counts of what became of blocks, of those that were used once and of those that were used again.
#[derive(Clone)]
pub(super) struct Likelihood {
    once: Seen,
    again: Seen,
    /// Blocks that are counted before all counts are halved.
    most: u64,
}

impl Likelihood {
    /// Of an order of so many blocks.
    pub(super) fn new(blocks: usize) -> Likelihood {
        Likelihood {
            once: Seen { used: BEFORE / 2, gone: BEFORE / 2 },
            again: Seen { used: BEFORE, gone: 0 },
            most: most_of(blocks),
        }
    }

    /// The order is of so many blocks from now on.
    pub(super) fn grow(&mut self, blocks: usize) {
        self.most = most_of(blocks);
    }

    /// A block that had been used so often, at least once, is used again.
    pub(super) fn note_used(&mut self, uses: u32) {
        self.of(uses).used += 1;
        self.age();
    }

    /// A block that had been used so often, at least once, has to go.
    pub(super) fn note_gone(&mut self, uses: u32) {
        self.of(uses).gone += 1;
        self.age();
    }

    fn of(&mut self, uses: u32) -> &mut Seen {
        if uses > 1 { &mut self.again } else { &mut self.once }
    }

    fn age(&mut self) {
        if self.once.all() + self.again.all() >= self.most {
            self.once.halve();
            self.again.halve();
        }
    }

    /// What a block that was used so often is worth beside others: one or two.
    pub(super) fn worth(&self, uses: u32) -> u64 {
        let Likelihood { once, again, .. } = *self;
        let (more, than) = NEWS;
        let news = than * again.used * once.all() >= more * once.used * again.all();
        if uses > 1 && news { 2 } else { 1 }
    }
}

fn most_of(blocks: usize) -> u64 {
    (blocks as u64).saturating_mul(4).max(16 * BEFORE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is worth a block that was used twice, after blocks of which some were used again: of
    /// each ten so many that had been used once, and so many that had been used twice.
    fn after(once: usize, again: usize) -> u64 {
        let mut likelihood = Likelihood::new(100);
        seen(&mut likelihood, once, again);
        likelihood.worth(2)
    }

    fn seen(likelihood: &mut Likelihood, once: usize, again: usize) {
        for at in 0..4000 {
            for (uses, of_ten) in [(1, once), (2, again)] {
                match at % 10 < of_ten {
                    true => likelihood.note_used(uses),
                    false => likelihood.note_gone(uses),
                }
            }
        }
    }

    #[test]
    fn a_second_use_counts_until_more_is_known() {
        let likelihood = Likelihood::new(100);
        assert_eq!([0, 1, 2, 9].map(|uses| likelihood.worth(uses)), [1, 1, 2, 2]);
    }

    #[test]
    fn it_counts_where_it_makes_a_block_half_as_likely_again() {
        assert_eq!([after(9, 10), after(9, 9), after(8, 10), after(9, 1)], [1; 4]);
        assert_eq!([after(2, 4), after(0, 1), after(5, 8)], [2; 3]);
    }

    #[test]
    fn counts_follow_what_comes() {
        let mut likelihood = Likelihood::new(100);
        for (once, again, worth) in [(9, 9, 1), (1, 5, 2), (9, 10, 1), (0, 9, 2)] {
            seen(&mut likelihood, once, again);
            assert_eq!(likelihood.worth(2), worth);
            assert!(likelihood.once.all() + likelihood.again.all() < 16 * BEFORE);
        }
    }
}
