//! One request as the scheduler knows it: how many tokens are known, and how many computed.

use crate::error::Error;

use super::config::PrefillOrder;

/// The caller's number of a request: free to choose, of one live request at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RequestId(pub u64);

/// Where a live request stands. One that has ended is known no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestState {
    /// Holds nothing; also after a preemption, with what it has said among its known tokens.
    Waiting,
    /// Holds room for all its known tokens, of which some are to be computed.
    Prefilling,
    /// All tokens but the last are computed.
    Decoding,
}

/// A request that comes.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// Its number.
    pub request: RequestId,
    /// Tokens of its prompt, at least one.
    pub tokens: usize,
    /// How many of them are expected to be cached: what they would cost is left out of its work.
    /// What counts in the end is what [`Room::admit`](super::Room::admit) says.
    pub cached: usize,
    /// More is sooner.
    pub priority: i32,
    /// Who pays: shares are between namespaces.
    pub namespace: &'a str,
    /// Requests of one kind can share a step; others wait for a step of their own.
    pub kind: u32,
    /// Whether the prompt is computed in one step or not at all.
    pub whole: bool,
}

impl Arrival<'_> {
    /// A prompt of priority 0 in the empty namespace, of kind 0, of which nothing is cached.
    #[must_use]
    pub fn new(request: RequestId, tokens: usize) -> Arrival<'static> {
        let (cached, priority, namespace, kind, whole) = (0, 0, "", 0, false);
        Arrival { request, tokens, cached, priority, namespace, kind, whole }
    }

    /// # Errors
    /// `InvalidArgument` for a prompt without tokens, of too many, or with more of them cached.
    pub(super) fn validate(&self) -> Result<(), Error> {
        if self.tokens == 0 || i32::try_from(self.tokens).is_err() {
            return Err(Error::invalid("tokens", "1 <= tokens <= 2147483647", self.tokens));
        }
        if self.cached > self.tokens {
            let expected = format!("at most the {} tokens of the prompt", self.tokens);
            return Err(Error::invalid("cached", expected, self.cached));
        }
        Ok(())
    }
}

/// What the last plan gave a request, as long as nobody has said how it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    Nothing,
    Token { step: u64 },
    Chunk { step: u64, first: usize },
}

/// A live request.
#[derive(Clone, Debug)]
pub(super) struct Tracked {
    pub(super) id: RequestId,
    /// How many came before it: the last word between equals.
    pub(super) order: u64,
    /// Since when it waits, or when it was admitted.
    pub(super) since: u64,
    pub(super) priority: i32,
    /// First arrival, moved by the priority: the less, the sooner. Never changes.
    pub(super) key: i64,
    /// Its place among prompts that wait. Never changes.
    pub(super) rank: i64,
    pub(super) namespace: u32,
    pub(super) kind: u32,
    pub(super) whole: bool,
    pub(super) state: RequestState,
    /// Tokens of the prompt and those said.
    pub(super) known: usize,
    /// Of these, whose KV is stored or planned.
    pub(super) computed: usize,
    /// Tokens expected to be cached.
    pub(super) cached: usize,
    pub(super) given: Given,
    /// The step in which it was last admitted.
    pub(super) admitted: u64,
    /// Whether its prompt has been charged to its namespace.
    pub(super) charged: bool,
    /// Where its prompt found no room that was promised: the `Books::eased` of then.
    pub(super) lacked: Option<u64>,
}

impl Tracked {
    /// Tokens to compute before the next can be said.
    pub(super) fn remaining(&self) -> usize {
        self.known - self.computed
    }

    /// Whether its next token is being computed: nothing can be planned for it meanwhile.
    pub(super) fn awaits_token(&self) -> bool {
        match self.given {
            Given::Nothing => false,
            Given::Token { .. } => true,
            Given::Chunk { .. } => self.computed == self.known,
        }
    }

    /// Whether something of it was planned before step `step` and has not been answered.
    pub(super) fn in_flight_before(&self, step: u64) -> bool {
        let given = match self.given {
            Given::Nothing => return false,
            Given::Token { step } | Given::Chunk { step, .. } => step,
        };
        self.awaits_token() && given != step
    }

    /// Its place among prompts that are being computed: what is left counts, not what was.
    pub(super) fn rank_now(&self, order: PrefillOrder) -> i64 {
        match order {
            PrefillOrder::Arrival => self.rank,
            PrefillOrder::ShortFirst { .. } => rank(order, self.key, self.known, self.computed),
        }
    }
}

/// The key of a request: `ageing` for each level of priority earlier than it came.
pub(super) fn key(arrived: u64, priority: i32, ageing: u64) -> i64 {
    let arrived = i64::try_from(arrived).unwrap_or(i64::MAX);
    let ageing = i64::try_from(ageing).unwrap_or(i64::MAX);
    arrived.saturating_sub(ageing.saturating_mul(priority.into()))
}

/// The place of a prompt of `tokens` of which `done` are cached or computed: the less, the sooner.
///
/// PREFLOW's 2^(age/D) / (total × remaining) at one time is ordered as −log₂ of it, times D, with
/// the time itself left out, which is the same for all.
pub(super) fn rank(order: PrefillOrder, key: i64, tokens: usize, done: usize) -> i64 {
    let PrefillOrder::ShortFirst { doubling } = order else { return key };
    let work = |n: f64| n * (n + 1.0) / 2.0;
    let total = work(tokens as f64);
    let remaining = (total - work(done.min(tokens - 1) as f64)).max(1.0);
    key.saturating_add((doubling as f64 * (total.log2() + remaining.log2())) as i64)
}
