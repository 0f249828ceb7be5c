//! Counts of blocks, hits and misses.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::content::{Index, MissReason};
use crate::ids::{AccountId, GroupId};
use crate::plan::{Outcome, ReusePlan, SegmentSource};
use crate::pool::Stored;

/// Blocks of one head group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GroupStats {
    /// Pages of one block.
    pub block_pages: u32,
    /// Blocks that the group owns; free + held + cached.
    pub total: usize,
    /// Blocks with no content.
    pub free: usize,
    /// Blocks named by a request or a knowledge base.
    pub held: usize,
    /// Blocks that are findable and evictable.
    pub cached: usize,
    /// Blocks that unclaimed slabs could still give.
    pub claimable: usize,
    /// Of the held blocks: pinned by a knowledge base.
    pub frozen: usize,
}

/// The quota of one namespace, and what is kept of it, in blocks of the first head group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Quota {
    /// The namespace.
    pub namespace: String,
    /// Blocks that it may keep.
    pub blocks: usize,
    /// Distinct blocks that its documents pin; never more than `blocks`.
    pub frozen: usize,
    /// Blocks that are cached.
    pub cached: usize,
}

/// What admissions found, in tokens unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Admissions that succeeded.
    pub requests: u64,
    /// Prompt tokens.
    pub tokens: u64,
    /// Reused by exact prefix.
    pub prefix_hits: u64,
    /// Reused from earlier requests.
    pub request_hits: u64,
    /// Reused from knowledge bases.
    pub frozen_hits: u64,
    /// Recomputed, by reason, in the order of [`MissReason::ALL`].
    pub misses: [u64; MissReason::ALL.len()],
}

/// The state of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheStats {
    /// One entry a head group, and with window groups one for the pages of promoted heads.
    pub groups: Vec<GroupStats>,
    /// Pages of the arena.
    pub arena_pages: u32,
    /// Distinct frozen blocks that are resident.
    pub frozen_blocks: usize,
    /// Frozen blocks given up under pressure.
    pub frozen_absent: usize,
    /// Pairs of namespace and RoPE regime of which there is a request, a cached block, or a
    /// document.
    pub namespaces: usize,
    /// Of every namespace that has one.
    pub quotas: Vec<Quota>,
    /// Blocks evicted so far.
    pub evictions: u64,
    /// Hits and misses.
    pub counters: Counters,
}

const HITS: usize = 5;

/// The running counters: requests, tokens, three kinds of hit, then the misses by reason.
#[derive(Default)]
pub(super) struct Tally([AtomicU64; HITS + MissReason::ALL.len()]);

impl Tally {
    pub(super) fn add(&self, plan: &ReusePlan) {
        self.count(0, 1);
        self.count(1, plan.tokens);
        for span in &plan.spans {
            let kind = match &span.outcome {
                Outcome::Prefix => 2,
                Outcome::Segment { source: SegmentSource::Request, .. } => 3,
                Outcome::Segment { source: SegmentSource::Frozen(_), .. } => 4,
                Outcome::Recompute { reason } => HITS + reason.index(),
            };
            self.count(kind, span.end - span.start);
        }
    }

    fn count(&self, kind: usize, by: usize) {
        self.0[kind].fetch_add(by as u64, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Counters {
        let at = |kind: usize| self.0[kind].load(Ordering::Relaxed);
        Counters {
            requests: at(0),
            tokens: at(1),
            prefix_hits: at(2),
            request_hits: at(3),
            frozen_hits: at(4),
            misses: std::array::from_fn(|reason| at(HITS + reason)),
        }
    }
}

/// The state of a cache whose heads are of `heads` groups.
pub(super) fn collect(stored: &Stored<Index>, heads: usize, counters: Counters) -> CacheStats {
    let frozen = stored.index.frozen.resident();
    let group = |index: usize| {
        let counts = stored.pool.counts(GroupId(index as u8));
        GroupStats {
            block_pages: counts.block_pages,
            total: counts.total,
            free: counts.free,
            held: counts.held,
            cached: counts.cached,
            claimable: counts.claimable,
            frozen: if index < heads { frozen } else { 0 },
        }
    };
    CacheStats {
        groups: (0..stored.pool.group_count()).map(group).collect(),
        arena_pages: stored.pool.arena_pages(),
        frozen_blocks: frozen,
        frozen_absent: stored.index.frozen.absent(),
        namespaces: stored.index.namespaces(),
        quotas: quotas(stored),
        evictions: stored.pool.evictions(),
        counters,
    }
}

/// The quotas of all namespaces that have one, by name.
fn quotas(stored: &Stored<Index>) -> Vec<Quota> {
    let quota = |(namespace, account): (&str, AccountId)| {
        let (blocks, frozen) = stored.index.frozen.charge(account);
        let (_, cached) = stored.pool.allowance(account, GroupId(0));
        Quota { namespace: namespace.to_owned(), blocks, frozen, cached }
    };
    stored.index.accounts().map(quota).collect()
}
