//! What a scheduler asks of memory.

use crate::error::Error;

use super::request::RequestId;

/// A failed allocation. Nothing was taken. Blocks are whatever the room counts in, the same
/// everywhere: blocks of one group, or pages where head groups differ in size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Blocks that were asked for.
    pub needed: usize,
    /// Blocks that could have been had, every evictable block counted.
    pub free: usize,
    /// Whether these are blocks of the host's memory: nobody gives way for them.
    pub at_home: bool,
}

impl Shortage {
    /// A shortage of the device's memory.
    #[must_use]
    pub fn new(needed: usize, free: usize) -> Shortage {
        Shortage { needed, free, at_home: false }
    }

    /// Blocks that were missing.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.needed.saturating_sub(self.free)
    }

    /// The same as an error about `what`.
    #[must_use]
    pub fn as_error(&self, what: &str) -> Error {
        let place = if self.at_home { " in the host's memory" } else { "" };
        Error::pool_full(&format!("{what}{place}"), self.needed, self.free)
    }
}

/// The memory that a scheduler hands out. Each call is all or nothing, and a waiting request holds
/// nothing: what it takes it takes in `admit`, for all its known tokens at once.
///
/// The scheduler counts tokens and never blocks, so that the room alone knows what a token costs:
/// a group with a window takes nothing for most tokens, a shared or frozen block is paid for once,
/// a block that a fork reads is copied before it is written. A room may take memory at once, as the
/// calls of a cache of the same names do, or count it beside a cache, as
/// [`BlockLedger`](super::BlockLedger) does.
pub trait Room {
    /// Whether `tokens` of a request could be held if nobody else held anything.
    ///
    /// # Errors
    /// What is missing.
    fn fits(&self, request: RequestId, tokens: usize) -> Result<(), Shortage>;

    /// Takes what a request needs to hold its first `tokens`, and leaves at least what the next
    /// block of tokens takes of `spare` others. Returns how many of these tokens are there already
    /// and need not be computed.
    ///
    /// # Errors
    /// What is missing.
    fn admit(&mut self, request: RequestId, tokens: usize, spare: usize)
    -> Result<usize, Shortage>;

    /// Takes what an admitted request needs to hold `tokens`, one more than before.
    ///
    /// # Errors
    /// What is missing.
    fn grow(&mut self, request: RequestId, tokens: usize) -> Result<(), Shortage>;

    /// Blocks that `release` would at least make available: not those that others read too.
    fn gain(&self, request: RequestId) -> usize;

    /// Gives back all that a request holds, if anything: called when one gives way or ends, in
    /// whatever state. What is computed may stay findable.
    fn release(&mut self, request: RequestId);

    /// Told when a request's memory could not be had after all, though `admit` or `grow` had said
    /// so and it goes on: it holds what `tokens` take, and the next call of these is refused.
    /// A room that takes real memory is never told this.
    fn retract(&mut self, request: RequestId, tokens: usize);
}
