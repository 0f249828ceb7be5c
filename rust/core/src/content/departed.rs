//! Which exact prefixes were cached before and had to go: what comes a second time is likelier to
//! come again (the ghost lists of 2Q and S3-FIFO, in bounded memory).

use crate::error::Error;
use crate::reserve::filled;

use super::hash::Digest;

/// A table of half digests, each at the place that the other half says. Newer ones overwrite older
/// ones there, so what is remembered is about what had to go last. Two prefixes that agree in both
/// halves are taken for each other, which costs a wrong guess and nothing else.
pub(super) struct Departed(Vec<u32>);

impl Departed {
    /// Remembers up to so many, rounded up to a power of two.
    ///
    /// # Errors
    /// `OutOfMemory` where it finds no room.
    pub(super) fn new(capacity: usize) -> Result<Departed, Error> {
        let room = capacity.checked_next_power_of_two().unwrap_or(usize::MAX);
        Ok(Departed(filled("prefixes that had to go", 0, room)?))
    }

    pub(super) fn remember(&mut self, digest: Digest) {
        let (at, mark) = self.place(digest);
        self.0[at] = mark;
    }

    /// Whether a prefix had to go, as far as that is remembered.
    pub(super) fn knows(&self, digest: Digest) -> bool {
        let (at, mark) = self.place(digest);
        self.0[at] == mark
    }

    /// No mark is 0, which stands for nothing.
    fn place(&self, digest: Digest) -> (usize, u32) {
        let low = digest.low();
        (low as usize & (self.0.len() - 1), (low >> 32) as u32 | 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::{BlockHasher, HashKind};

    /// Digests as a hash makes them.
    fn digest(number: u32) -> Digest {
        BlockHasher::new(HashKind::Xxh3_128, 0, 16).chain(Digest::ZERO, &[number])
    }

    #[test]
    fn what_went_is_known_and_nothing_else() {
        let mut departed = Departed::new(1000).unwrap();
        assert_eq!(departed.0.len(), 1024);
        for number in 1..100 {
            assert!(!departed.knows(digest(number)));
            departed.remember(digest(number));
            assert!(departed.knows(digest(number)));
        }
        assert!((100..10_000).all(|number| !departed.knows(digest(number))));
    }

    #[test]
    fn what_went_long_ago_makes_way() {
        let mut departed = Departed::new(64).unwrap();
        (0..10_000).for_each(|number| departed.remember(digest(number)));
        assert!((0..5_000).filter(|&number| departed.knows(digest(number))).count() < 3);
        assert!((9_990..10_000).filter(|&number| departed.knows(digest(number))).count() > 5);
    }

    #[test]
    fn one_place_is_enough_and_none_is_refused() {
        let mut departed = Departed::new(0).unwrap();
        departed.remember(digest(7));
        assert!(departed.knows(digest(7)));
        assert!(Departed::new(usize::MAX).is_err());
    }
}
