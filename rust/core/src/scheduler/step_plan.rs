//! What a step does, as plain data.

use super::request::RequestId;
use super::room::Shortage;

/// Tokens [first, first + count) of a prompt to be computed. Whoever was preempted has what it
/// said among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Whose.
    pub request: RequestId,
    /// The first token.
    pub first: usize,
    /// How many.
    pub count: usize,
    /// Whether these are the last: the next token is wanted.
    pub last: bool,
}

/// A request that has got room for all its known tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// Which.
    pub request: RequestId,
    /// Its tokens: the prompt and what it has said.
    pub known: usize,
    /// How many of them are there already.
    pub cached: usize,
}

/// A request that gave its room up and waits again; what it said is kept and computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preempted {
    /// Which.
    pub request: RequestId,
    /// For whom: the request that had found no room, which may be itself.
    pub for_request: RequestId,
}

/// Why a request ends unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// With what it has said, it is larger than the room.
    Outgrown(Shortage),
}

/// A request that has been ended: it holds nothing and is known no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Which.
    pub request: RequestId,
    /// Why.
    pub why: Refusal,
}

/// One step of the whole batch. The parts are carried out in the order of the fields: first room
/// is given back, then taken, then used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// The number of the plan, from 1 on.
    pub step: u64,
    /// The kind of all requests that compute something.
    pub kind: u32,
    /// Who ends unasked.
    pub refused: Vec<Refused>,
    /// Who gives its room up.
    pub preempted: Vec<Preempted>,
    /// Who has got room.
    pub admitted: Vec<Admitted>,
    /// Who decodes: each has the KV of its last known token computed, and says another one.
    pub decode: Vec<RequestId>,
    /// Which parts of which prompts are computed, at most one of each.
    pub prefill: Vec<Chunk>,
    /// The first who found no room, and what was missing: one of none where all places among those
    /// who run are taken.
    pub blocked: Option<(RequestId, Shortage)>,
}

impl StepPlan {
    /// Whether nothing is computed.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.decode.is_empty() && self.prefill.is_empty()
    }

    /// Tokens that are computed.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.decode.len() + self.prefill.iter().map(|chunk| chunk.count).sum::<usize>()
    }
}
