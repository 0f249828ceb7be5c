//! What a scheduler is built from.

use crate::error::Error;

/// In what order waiting prompts are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillOrder {
    /// By key: priority with ageing, then first arrival.
    #[default]
    Arrival,
    /// By 2^(age/D) / (total work × remaining work), the work of n tokens being n(n+1)/2, what is
    /// cached left out (PREFLOW): short prompts first, and whoever waits doubles its weight each D.
    ShortFirst {
        /// D in nanoseconds, at least 1.
        doubling: u64,
    },
}

/// Budgets and rules of a [`Scheduler`](super::Scheduler). Times are nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Tokens that a step computes at most: one for each request that decodes, the rest prompts.
    /// Only a prompt that cannot be cut may exceed it.
    pub token_budget: usize,
    /// Tokens of one prompt that a step computes at most.
    pub chunk_tokens: usize,
    /// Chunks are multiples of this, but for the last of a prompt.
    pub chunk_multiple: usize,
    /// Requests that hold memory at the same time, at most.
    pub max_running: usize,
    /// Prompts that share a step's budget, at most; one place is kept for prompts of no more than
    /// `chunk_tokens`.
    pub partial_prefills: usize,
    /// Percent of the budget that the first of these prompts gets at least, as far as it can use
    /// it; the others share the rest evenly.
    pub lead_percent: usize,
    /// A request of priority p is as one of priority 0 that came p times this earlier.
    pub ageing: u64,
    /// How long a request that finds no room lets others pass. Behind it, nobody is admitted then.
    pub patience: u64,
    /// Blocks for each running request that an admission leaves free.
    pub headroom: usize,
    /// Tokens that a namespace of weight 1 may have computed for it before others get their turn.
    pub quantum: u64,
    /// Steps after which requests of another kind have theirs.
    pub kind_patience: u64,
    /// The order of prompts.
    pub order: PrefillOrder,
}

impl Default for SchedulerConfig {
    fn default() -> SchedulerConfig {
        SchedulerConfig {
            token_budget: 8192,
            chunk_tokens: 8192,
            chunk_multiple: 16,
            max_running: 256,
            partial_prefills: 4,
            lead_percent: 50,
            ageing: 10_000_000_000,
            patience: 2_000_000_000,
            headroom: 1,
            quantum: 65_536,
            kind_patience: 8,
            order: PrefillOrder::Arrival,
        }
    }
}

impl SchedulerConfig {
    /// # Errors
    /// `InvalidArgument` naming a field that cannot be right.
    pub(super) fn validate(&self) -> Result<(), Error> {
        let at_least = |name: &str, value: u64, least: u64| {
            if value < least {
                return Err(Error::invalid(name, format!("at least {least}"), value));
            }
            Ok(())
        };
        at_least("max_running", self.max_running as u64, 1)?;
        at_least("chunk_multiple", self.chunk_multiple as u64, 1)?;
        at_least("chunk_tokens", self.chunk_tokens as u64, self.chunk_multiple as u64)?;
        at_least("partial_prefills", self.partial_prefills as u64, 2)?;
        at_least("quantum", self.quantum, 1)?;
        at_least("kind_patience", self.kind_patience, 1)?;
        if let PrefillOrder::ShortFirst { doubling } = self.order {
            at_least("doubling", doubling, 1)?;
        }
        if self.lead_percent > 100 {
            return Err(Error::invalid("lead_percent", "at most 100", self.lead_percent));
        }
        let chunks = self.partial_prefills.saturating_mul(self.chunk_multiple);
        let least = self.max_running.saturating_add(chunks);
        if self.token_budget < least {
            let expected = format!("at least {least}: every running request and a chunk each");
            return Err(Error::invalid("token_budget", expected, self.token_budget));
        }
        for (name, value) in [("token_budget", self.token_budget), ("headroom", self.headroom)] {
            if i32::try_from(value).is_err() {
                return Err(Error::invalid(name, "at most 2147483647", value));
            }
        }
        Ok(())
    }
}
